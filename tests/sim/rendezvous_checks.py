"""What must hold in every simulated rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.common_order import require

from ronde.core.rendezvous_state import Cause, Rules
from ronde.core.round import (
    AllSucceeded,
    Budget,
    Ejected,
    JobClosed,
    NodesLost,
    RendezvousBroken,
    Round,
)

if TYPE_CHECKING:
    from tests.sim.rendezvous_node import SimNode

PATIENCE_NS = (
    70 * 10**9
)  # in which a round must begin if enough nodes are there: silence, stragglers, last call


class Checks:
    """Collects what the nodes were told, and complains at once."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.rounds: dict[int, Round] = {}  # as whoever was told first was told
        self.begun: dict[int, dict[str, int]] = {}  # by round: the group ranks of those who were told
        self.causes: dict[int, Cause] = {}
        self.succeeded: dict[int, set[str]] = {}
        self.completed: int | None = None
        self.leader_harmed_ns = -PATIENCE_NS  # a new leader begins a new last call
        self.closed: JobClosed | None = None

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
        if len(ranks) == 1:
            self.new_round(round)

    def new_round(self, round: Round) -> None:
        rules, budget, number = self.rules, self.budget, round.number
        require(len({node.id for node in round.nodes}) == len(round.nodes), "a node has two ranks")
        fits = rules.min_nodes <= len(round.nodes) <= rules.max_nodes
        require(fits, f"round {number} has {len(round.nodes)} nodes")
        require(round.restarts <= budget.restarts, "more restarts than the budget allows")
        require(budget.changes < 0 or round.changes <= budget.changes, "more changes than the budget allows")
        require(round.restarts + round.changes <= number, "a round that nothing has ended")
        if before := self.rounds.get(number - 1):
            kept = {node.id: place for place, node in enumerate(before.nodes)}
            for place, node in enumerate(round.nodes):
                if kept.get(node.id, len(round.nodes)) < len(round.nodes):
                    require(kept[node.id] == place, f"{node.id} has lost its place in round {number}")

    def ended(self, node: SimNode, number: int, cause: Cause) -> None:
        require(node.round is not None, node.name, "is told of an end while it is in no round")
        assert node.round
        require(number == node.round.number, node.name, "is told of the end of another round")
        require(self.causes.setdefault(number, cause) == cause, "two causes for the end of round", number)
        require(self.completed != number, "a round ends and has completed")

        if isinstance(cause, NodesLost):
            for lost in cause.nodes:
                require(
                    node.sim.by_id(lost.id).is_harmed,
                    lost.id,
                    "is well, but was taken for dead:",
                    cause.reason,
                )

    def harmed(self, node: SimNode, event: Ejected) -> None:
        require(node.is_harmed, node.name, "is well, but was ejected:", event.reason)

    def gave_up(self, node: SimNode, nodes: Sequence[SimNode]) -> None:
        """It has waited for long. Were there not enough others, or was there no place?"""
        rules, now_ns = self.rules, node.sim.now_ns
        there = [each for each in nodes if each.is_alive and each.outcome is None and not each.is_frozen]
        waiting = [each for each in there if each.round is None and now_ns - each.joined_ns > PATIENCE_NS]
        working = [each.round for each in there if each.round]
        if not working and now_ns - self.leader_harmed_ns > PATIENCE_NS:
            require(len(waiting) < rules.min_nodes, node.name, "gives up, but enough nodes wait with it")
        for round in working:
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

    def outcome(self, node: SimNode) -> str:
        """Called at the end for every node that lives."""
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
