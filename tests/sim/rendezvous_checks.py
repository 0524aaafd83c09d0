"""The invariants of every simulated rendezvous."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tests.sim.common_order import require

from ronde.rendezvous.membership import (
    AllSucceeded,
    Budget,
    Ejected,
    JobClosed,
    NodesLost,
    RendezvousBroken,
    Round,
    Rules,
)
from ronde.rendezvous.state import STATE, Cause, JobPhase, JobState, RosterKey, decode_state, heartbeat_key

if TYPE_CHECKING:
    from tests.sim.rendezvous_node import SimNode
    from tests.sim.rendezvous_store import SimStore

INTERRUPTED = "interrupted"  # why a node ends the job
# In which a round must begin if enough nodes are there: silence, stragglers, last call.
PATIENCE_NS = 70 * 10**9


class Checks:
    """Collects the events of all nodes, and raises Broken at the first violation."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.rounds: dict[int, Round] = {}  # as the first node received it
        # By round: the group ranks of the nodes that have received it.
        self.begun: dict[int, dict[str, int]] = {}
        self.decided_ns: dict[tuple[SimStore, RosterKey | None], int] = {}  # when rounds began
        self.losses: set[tuple[RosterKey | None, Cause]] = set()  # that have been looked at
        self.causes: dict[int, Cause] = {}
        # Rounds that the store has lost before all their nodes received them.
        self.half_known: set[int] = set()
        # Rounds whose end the store has lost before all their nodes heard of it: the others may find another cause.
        self.half_ended: set[int] = set()
        self.succeeded: dict[int, set[str]] = {}
        self.completed: int | None = None
        self.leader_harmed_ns = -PATIENCE_NS  # a new leader begins a new last call
        self.closed: JobClosed | None = None
        self.buried: set[str] = set()  # nodes that died, and were known to be lost
        # By node: the state that it knew when it reported the end of the job.
        self.known_at_end: dict[str, JobState | None] = {}

    def forget(self, number: int) -> None:
        """Forget a round whose nodes have all ended: another round may have its number."""
        for book in (self.rounds, self.begun, self.causes, self.succeeded):
            book.pop(number, None)

    def decided(self, node: SimNode, state: JobState) -> None:
        """Note that this node has written this state."""
        if state.phase == JobPhase.RUNNING:
            self.decided_ns.setdefault((node.place, state.roster), node.sim.now_ns)
        cause = state.cause
        if state.phase == JobPhase.FORMING and isinstance(cause, NodesLost):
            if (state.roster, cause) not in self.losses:
                self.losses.add((state.roster, cause))
                for lost in cause.nodes:
                    may = self.may_lose(node, node.sim.by_id(lost.id))
                    require(may, lost.id, "is well, but was taken for dead:", cause.reason)

    def may_lose(self, node: SimNode, other: SimNode) -> bool:
        """Return whether this node may take the other one for lost."""
        return other.is_harmed

    def began(self, node: SimNode, round: Round) -> None:
        number = round.number
        require(number > node.last_number, node.name, "is told of round", number, "after", node.last_number)
        require(node.round is None, node.name, "is told of round", number, "while it is in one")
        node.last_number = number
        require(0 <= round.group_rank < len(round.nodes), "no such group rank")
        require(round.nodes[round.group_rank].id == node.node.id, node.name, "has the rank of another")
        first = self.rounds.setdefault(number, round)
        require(first.nodes == round.nodes, "two rank assignments of round", number, first.nodes, round.nodes)
        same = first.restarts == round.restarts and first.changes == round.changes
        require(same, "two counts of restarts or changes in round", number)
        ranks = self.begun.setdefault(number, {})
        require(node.node.id not in ranks, node.name, "begins round", number, "twice")
        require(round.group_rank not in ranks.values(), "one group rank of two nodes in round", number)
        ranks[node.node.id] = round.group_rank
        node.is_waiting = False
        if len(ranks) == 1:
            self.new_round(round)

    def lost_store(self) -> None:
        """Note a round that not all of its nodes have received: one of them may be the first to write a state."""
        last = max(self.rounds, default=-1)
        if last >= 0 and len(self.begun[last]) < len(self.rounds[last].nodes):
            self.half_known.add(last)
        if last in self.causes:
            self.half_ended.add(last)

    def new_round(self, round: Round) -> None:
        rules, budget, number = self.rules, self.budget, round.number
        require(len({node.id for node in round.nodes}) == len(round.nodes), "a node has two ranks")
        fits = rules.min_nodes <= len(round.nodes) <= rules.max_nodes
        require(fits, f"round {number} has {len(round.nodes)} nodes")
        require(round.restarts <= budget.restarts, "more restarts than the budget allows")
        require(budget.changes < 0 or round.changes <= budget.changes, "more changes than the budget allows")
        require(round.restarts + round.changes <= number, "a round that nothing has ended")
        before = self.rounds.get(number - 1)
        if before and before.number not in self.half_known:
            kept = {node.id: place for place, node in enumerate(before.nodes)}
            for place, node in enumerate(round.nodes):
                if kept.get(node.id, len(round.nodes)) < len(round.nodes):
                    require(kept[node.id] == place, f"{node.id} has lost its place in round {number}")

    def ended(self, node: SimNode, number: int, cause: Cause) -> None:
        require(node.round is not None, node.name, "is told of an end while it is in no round")
        assert node.round
        require(number == node.round.number, node.name, "is told of the end of another round")
        is_same = self.causes.setdefault(number, cause) == cause or number in self.half_ended
        require(is_same, "two causes for the end of round", number)
        require(self.completed != number, "a round ends and has completed")

        if isinstance(cause, NodesLost):
            self.buried.update(lost.id for lost in cause.nodes if not node.sim.by_id(lost.id).is_alive)

    def harmed(self, node: SimNode, event: Ejected) -> None:
        require(node.is_harmed, node.name, "is well, but was ejected:", event.reason)

    def gave_up(self, node: SimNode, nodes: Sequence[SimNode]) -> None:
        """Check a node that has waited in vain: there were too few others, or no place."""
        rules, now_ns = self.rules, node.sim.now_ns
        there = [each for each in nodes if each.is_alive and each.outcome is None and not each.is_frozen]
        waiting = [each for each in there if each.round is None and now_ns - each.joined_ns > PATIENCE_NS]
        working = [each.round for each in there if each.round]
        if not working and now_ns - self.leader_harmed_ns > PATIENCE_NS:
            require(len(waiting) < rules.min_nodes, node.name, "gives up, but enough nodes wait with it")
        for round in working if now_ns - node.joined_ns > PATIENCE_NS else ():
            size = len({each.id for each in round.nodes})
            is_spent = 0 <= self.budget.changes <= round.changes
            is_ending = bool(self.succeeded.get(round.number))
            require(
                size == rules.max_nodes or is_spent or is_ending, node.name, "gives up, but there is room"
            )

    def all_succeeded(self, node: SimNode, number: int) -> None:
        require(node.round is not None and node.round.number == number, node.name, "was not in round", number)
        require(self.completed in (None, number), "two rounds have completed")
        require(number not in self.causes, "a round has ended and completed")
        self.completed = number
        wanted = {each.id for each in self.rounds[number].nodes}
        missing = wanted - self.succeeded.get(number, set())
        require(not missing, "round", number, "has completed without", missing)

    def ends_job(self, node: SimNode) -> None:
        self.known_at_end[node.node.id] = node.participant.state

    def wrote(self, node: SimNode, state: JobState) -> None:
        """Note that this node, which ends the job, has written this; as a leader perhaps for another reason.

        A waiting node takes part in the round that it knows, and in the next one, which may begin meanwhile. A waiting
        node that knows no state was unknown to the others: like any newcomer, it ends the job.
        """
        if state.phase == JobPhase.CLOSED and state.reason.endswith(INTERRUPTED):
            known = self.known_at_end[node.node.id]
            if node.is_waiting and known is None:
                return
            last = known.number + 1 if node.is_waiting and known else node.last_number
            without = max(self.rounds, default=-1) > last
            require(not without, node.name, "ends a job that has gone on without it")

    def goes(self, node: SimNode) -> None:
        if node.is_heard:
            raw = node.place.values.get(STATE)
            is_over = raw is not None and not decode_state(raw).is_open
            require(is_over, node.name, "has ended the job and goes, but the job goes on")

    def store(self, state: JobState, keys: Collection[str], led_to_the_end: bool) -> None:
        """Check the keys left in the store at the end. A leader that dies or starts again may leave more."""
        if state.term == 1 and not state.is_open and led_to_the_end:
            left = [node for node in self.buried if heartbeat_key(node) in keys]
            require(not left, "beats of the dead are left:", left)

    def outcome(self, node: SimNode) -> str:
        """Check a living node at the end."""
        match node.outcome:
            case AllSucceeded():
                return "succeeded"
            case JobClosed(_, _, True):
                done = (
                    {each.id for each in round.nodes} <= self.succeeded.get(number, set())
                    for number, round in self.rounds.items()
                )
                require(any(done), "the job is said to have completed")
                return "not needed"
            case JobClosed() as closed:
                require(self.completed is None, "the job has completed, and is closed")
                self.closed = self.closed or closed
                require(closed == self.closed, "two reasons for the end of the job")
                return "closed"
            case RendezvousBroken():
                return "gave up waiting"
        require(False, node.name, "does not know what has become of the job")
        return ""
