"""The leader's decisions: which nodes form a round, when it begins, why it ends, and which nodes are lost. Pure.

Rules

1. The first round waits for the minimum of nodes, then for the last call, or until it is full. So does a later round if
   too few nodes have survived. Otherwise a round begins as soon as all survivors of the last one have joined. The
   leader leaves behind a survivor that lives and does not join: after the last call, after `STRAGGLER_NS`, and after
   its workers must have ended, whichever is latest.
2. A round ends at once when one of its nodes is lost, reports a failed worker, or leaves. The first of these to arrive
   is the cause. A failure that blames a peer waits for a better cause until every other node has shown that it lives,
   and until no node has a worker that has left the others and still runs, for `longest_end_ns` at most.
3. Late nodes wait. If there is room for them, the leader ends the round for them: at once if the next round is then
   full, or as large as the largest so far, else after the last call, while the others work on. It does not once a node
   has succeeded.
4. A round that ends for a failed worker counts as a restart, any other end as a change, but for one that a node has
   asked for. When a budget is spent, the
   next such end closes the job; late nodes then go on waiting.
5. The death of a node that has succeeded is no loss. When all nodes have succeeded, the job is completed.
6. A node is lost at once when the key that it holds is gone, and after `missing_heartbeats` heartbeats of silence
   (`failure_detectors`).
7. Survivors of the last round get a place first, then nodes whose workers run on, then all others in the order of their
   arrival. A node that can
   never have a place is refused. If two nodes are given one group rank, the leader refuses the later one once both have
   lived for longer than the patience; before that, the first node may be a previous start of the second.
8. Where others may go on elsewhere, a round begins only with enough nodes of the last one (`quorum`), and only when no
   lost node can have workers any more (`liveness`).
9. A node that wishes for a group rank gets it; of two such nodes, the one that had the rank gets it, else the earlier
   one. A node of the last round keeps its rank if the rank still exists. The remaining ranks go, from the lowest, first
   to nodes whose old rank no longer exists, then to newcomers in the order of their host names (numbers in them count
   as numbers), so that neighbouring hosts get neighbouring ranks, and nodes that share a host follow each other.
   Where nodes can be replaced (`gives_way`), all nodes of the last round come before the newcomers, and a wish only
   orders the newcomers: rank 0 is a node that has the state, as programs for Horovod expect.
10. A message counts once (the `seq` of its sender grows), and only if it concerns the present round.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from ronde.rank_set import RankSet
from ronde.rendezvous.failure_detectors import FailureDetector
from ronde.rendezvous.liveness import LeftoverWorkers
from ronde.rendezvous.membership import (
    ChangeRequested,
    Failure,
    Node,
    NodesLost,
    NodesWaiting,
    Rules,
    WorkerFailed,
    node_names,
)
from ronde.rendezvous.quorum import Quorum
from ronde.rendezvous.state import (
    PART_NODES,
    Cause,
    ChangeRequest,
    FailureReport,
    Heartbeat,
    JobPhase,
    JobState,
    JoinRequest,
    LeaveNotice,
    Message,
    Refused,
    RosterKey,
    SuccessReport,
)

__all__ = [
    "STRAGGLER_NS",
    "Leader",
    "Applicants",
    "assign_group_ranks",
    "host_order",
    "put_survivors_first",
]

STRAGGLER_NS = 30 * 10**9  # for workers that are slow to end
NAMED_NODES = 32  # of the lost ones, in the state
REFUSALS = 16  # kept in the state


@dataclass(slots=True)
class _UnsettledFailure:
    """A failure that blames a peer, and the nodes that have not shown since that they live.

    `awaits_exit`: the nodes with a worker whose exit code may be the cause; the wait for it ends at `until_ns`.
    """

    failure: Failure
    unconfirmed: set[str]
    awaits_exit: set[str]
    until_ns: int


class Leader:
    """The decisions of one term.

    `state`: what the store should contain. `is_urgent`: the state must be written before the next event. `roster`: the
    nodes that `state.roster` names; they must be written before the state. `departed`: nodes that are gone, and left a
    heartbeat in the store. `unwatched`: nodes that arrived since the inbox cleared this.
    """

    def __init__(self, rules: Rules, state: JobState, roster: Sequence[Node], now_ns: int) -> None:
        """`roster`: the nodes of the last round that began. `now_ns`: from one monotonic clock in all calls."""
        self.state = state
        self.roster = tuple(roster)
        self.is_urgent = False
        self._rules = rules
        self._by_id = {node.id: node for node in roster}
        self._survivors = {node.id: node for node in roster}  # not known to be dead
        self._applicants = Applicants(rules)
        self.quorum = Quorum(rules, self._by_id)
        self._succeeded: set[str] = set()
        self._leaving: set[str] = set()
        self.departed: set[str] = set()
        self._seqs: dict[str, int] = {}
        self._detector = FailureDetector(rules, self._by_id, now_ns)
        self.leftover_workers = LeftoverWorkers(rules)
        self._unsettled: _UnsettledFailure | None = None
        self._formed_ns = now_ns  # when the present round began to form
        self._last_call_ns: int | None = None  # when the last call ends
        self._too_few = state.roster is None
        # Before that, the count of missing nodes that the last leader wrote is better than this one's.
        self._informed_ns = now_ns + rules.silence_ns
        self._ticked_ns = now_ns
        self.unwatched: set[str] = set(self._by_id)
        if state.phase == JobPhase.FORMING and isinstance(state.cause, NodesLost):
            for node in state.cause.ids(self.roster):
                self.leftover_workers.add_lost_node(node, now_ns)
                self._survivors.pop(node, None)
                self._detector.remove_node(node)
                self.departed.add(node)
        self._decide(now_ns)

    @property
    def nodes(self) -> KeysView[str]:
        """The ids of the nodes under observation: those of the round, and the applicants."""
        return self._detector.nodes

    @property
    def wake_ns(self) -> int:
        """When the next `tick` is due."""
        deadline_ns = self._deadline_ns()
        read_ns = self._detector.read_ns
        return read_ns if deadline_ns is None else min(read_ns, deadline_ns)

    def tick(self, now_ns: int) -> bool:
        """Decide what depends on the time; return whether the heartbeats must be read now."""
        self._ticked_ns = now_ns
        self._settle_failure(now_ns)
        self._decide(now_ns)
        if not self._detector.begin_reading(now_ns):
            return False
        patience_ns = self._detector.silence_ns + self._rules.heartbeat_ns
        for refused in self._applicants.refuse_rivals(now_ns, self._survivors.values(), patience_ns):
            self._detector.remove_node(refused.id)
            self.departed.add(refused.id)
            self._refuse_node(refused)
        self._detector.suspect_silent_nodes(now_ns)
        self._count_nodes(now_ns)
        return True

    def _deadline_ns(self) -> int | None:
        waits = (JobPhase.FORMING, JobPhase.RUNNING)
        deadlines = [self._last_call_ns] if self.state.phase in waits else []
        if self.state.phase == JobPhase.FORMING:
            deadlines.append(self.leftover_workers.until_ns)
        if self.state.phase == JobPhase.FORMING and self._has_stragglers():
            deadlines.append(self._formed_ns + self._straggler_ns())
        return min((each for each in deadlines if each is not None and each > self._ticked_ns), default=None)

    # Events

    def note_heartbeats(
        self, now_ns: int, heartbeats: Mapping[str, Heartbeat | None], asked: Iterable[str]
    ) -> None:
        """Note the changed `heartbeats` of a reading that `asked` for those of these nodes."""
        for node, heartbeat in heartbeats.items():
            if node in self._detector.nodes:
                shows_life = self._detector.note_heartbeat(now_ns, node, heartbeat)
                if shows_life:
                    self.quorum.note_present((node,))
                self._note_heartbeat(now_ns, node, heartbeat, shows_life)
            elif heartbeat is not None:
                self._note_late_heartbeat(now_ns, node)
        if silent := self._detector.confirm_silence(asked, heartbeats):
            self.lose_nodes(
                now_ns, silent, f"was silent for {self._rules.silence_ns / 1e9:g} s", may_work=True
            )

    def note_present(self, now_ns: int, nodes: Collection[str]) -> None:
        """Note that these nodes hold their keys in this store."""
        self.quorum.note_present(nodes)
        if self.state.has_moved:
            self._decide(now_ns)

    def _note_heartbeat(self, now_ns: int, node: str, heartbeat: Heartbeat | None, shows_life: bool) -> None:
        if self._unsettled and shows_life:
            self._unsettled.unconfirmed.discard(node)
            awaits_exit = heartbeat is not None and heartbeat.awaits_exit
            (self._unsettled.awaits_exit.add if awaits_exit else self._unsettled.awaits_exit.discard)(node)
        if heartbeat is not None and heartbeat.succeeded == self.state.number:
            self._note_success(node)
        self._settle_failure(now_ns)

    def _note_late_heartbeat(self, now_ns: int, node: str) -> None:
        """Note that a lost node has sent a heartbeat. It may have renewed its lease while its workers end."""
        may_work = node in self.leftover_workers.nodes and node not in self._leaving
        if may_work and now_ns < self._formed_ns + self._straggler_ns():
            self.leftover_workers.add_lost_node(node, now_ns)

    def handle_message(self, now_ns: int, message: Message) -> None:
        """Act on a node's message."""
        sender = message.node.id if isinstance(message, JoinRequest) else message.id
        if message.seq <= self._seqs.get(sender, -1) or self.state.phase in (
            JobPhase.COMPLETED,
            JobPhase.CLOSED,
        ):
            return
        self._seqs[sender] = message.seq
        match message:
            case JoinRequest():
                self._handle_join(now_ns, message)
            case FailureReport(_, _, number, failure):
                if self._is_running(sender, number):
                    self._handle_failure(now_ns, sender, failure)
            case SuccessReport(_, _, number):
                if self._is_running(sender, number):
                    self._note_success(sender)
            case ChangeRequest(_, _, number, reason):
                if self._is_running(sender, number):
                    self._end_round(now_ns, ChangeRequested(reason))
            case LeaveNotice(_, _, _, reason, ends_within_ns):
                self.quorum.note_ended({sender})
                self.departed.add(sender)
                if not ends_within_ns:
                    self.leftover_workers.discard_nodes({sender})
                elif sender in self._by_id and sender not in self._leaving:
                    # Its time counts from the first notice, not from a repeated one.
                    self._leaving.add(sender)
                    self.leftover_workers.expect_end(sender, now_ns + ends_within_ns)
                self.lose_nodes(now_ns, {sender}, f"left: {reason}" if reason else "left")
        self._decide(now_ns)

    def _is_running(self, sender: str, number: int) -> bool:
        is_present = self.state.phase == JobPhase.RUNNING and number == self.state.number
        return is_present and sender in self._survivors

    def _handle_join(self, now_ns: int, join: JoinRequest) -> None:
        node = join.node
        state = self.state
        last = state.number if state.phase == JobPhase.RUNNING else state.number - 1
        if node.id in self._by_id and join.after < last:
            return  # sent before the round in which the node took part
        if reason := self._applicants.reason_to_refuse(node):
            self._refuse_node(Refused(node.id, reason))
            return
        if state.phase == JobPhase.RUNNING and node.id in self._survivors:
            self.lose_nodes(now_ns, {node.id}, "has given up the round")
        if self.state.phase == JobPhase.FORMING and join.after >= self.state.number:
            self.state = replace(self.state, number=join.after + 1)  # the store has lost a later state
        if self.state.phase in (JobPhase.FORMING, JobPhase.RUNNING):
            self._applicants.add_node(node)
            self.leftover_workers.discard_nodes({node.id})
            is_promised = self.state.roster is not None and self.state.roster.number == join.promised
            self.quorum.note_promise(node.id, is_promised)
            self.departed.discard(node.id)
            self._detector.add_node(now_ns, node.id)
            self.unwatched.add(node.id)

    def _handle_failure(self, now_ns: int, sender: str, failure: Failure) -> None:
        self._succeeded.discard(sender)  # a worker has ended with exit code 0, and others wait for it
        if failure.blames_peer and len(self.roster) > 1:
            if self._unsettled is None:
                until_ns = now_ns + self._rules.longest_end_ns
                self._unsettled = _UnsettledFailure(
                    failure, self._by_id.keys() - self._succeeded, set(), until_ns
                )
            self._unsettled.unconfirmed.discard(sender)
            self._settle_failure(now_ns)
        elif self._rules.gives_way and self.state.restarts >= self.state.terms.max_restarts:
            # The node is lost, and the job goes on: failures of other nodes may be consequences of this one.
            self.lose_nodes(now_ns, {sender}, f"left: {failure.message}", may_work=True)
        else:
            self._end_round(now_ns, WorkerFailed(failure))

    def _settle_failure(self, now_ns: int) -> None:
        unsettled = self._unsettled
        if (
            unsettled
            and not unsettled.unconfirmed
            and (not unsettled.awaits_exit or now_ns >= unsettled.until_ns)
        ):
            self._end_round(now_ns, WorkerFailed(unsettled.failure))

    def _note_success(self, node: str) -> None:
        if self.state.phase == JobPhase.RUNNING and node in self._by_id:
            self._succeeded.add(node)
            if self._unsettled:
                self._unsettled.unconfirmed.discard(node)
                self._unsettled.awaits_exit.discard(node)
            if self._succeeded >= self._by_id.keys():
                self._unsettled = None
                self.state = replace(self.state, phase=JobPhase.COMPLETED)
                self.is_urgent = True

    def lose_nodes(self, now_ns: int, nodes: Iterable[str], how: str, may_work: bool = False) -> None:
        """Take these nodes for lost. `how` completes a sentence about them; `may_work`: their workers may still run.

        Read their last heartbeats first, because a node that has succeeded is no loss.
        """
        gone = [node for node in nodes if node in self._detector.nodes]
        lost = [self._by_id[node] for node in gone if node in self._survivors and node not in self._succeeded]
        for each in lost if may_work else ():
            if not self._applicants.has_no_workers(each.id):
                self.leftover_workers.add_lost_node(each.id, self._detector.last_heartbeat_ns(each.id))
        for node in gone:
            self._detector.remove_node(node)
            self._survivors.pop(node, None)
            self._applicants.remove_node(node)
        self.departed.update(gone)
        if self.state.phase == JobPhase.RUNNING:
            self.state = replace(self.state, alive=len(self._survivors))
        if lost and self.state.phase == JobPhase.RUNNING:
            hosts = set(node_names(lost, self.roster))
            what = f"were {how.removeprefix('was ')}" if len(hosts) > 1 and how.startswith("was ") else how
            ranges = self._rank_ranges(lost) if len(lost) > NAMED_NODES else ()
            self._end_round(now_ns, NodesLost(tuple(lost[:NAMED_NODES]), f"{_names(hosts)} {what}", ranges))
        self._decide(now_ns)

    def _rank_ranges(self, lost: Collection[Node]) -> tuple[int, ...]:
        """Return the group ranks of these nodes of the roster, in pairs of first and last."""
        ids = {node.id for node in lost}
        ranks = RankSet.of(rank for rank, node in enumerate(self.roster) if node.id in ids)
        return tuple(rank for pair in ranks.ranges for rank in pair)

    def note_agents_ended(self, now_ns: int, nodes: Collection[str], how: str) -> None:
        """Note that the agents of these nodes have certainly ended, before they could go elsewhere."""
        self.quorum.note_ended(nodes)
        self.leftover_workers.discard_nodes(nodes)
        self.lose_nodes(now_ns, nodes, how)

    def note_workers_ended(self, now_ns: int, nodes: Collection[str]) -> None:
        """Note that the agents of these lost nodes have ended by now, and their workers with them."""
        self.leftover_workers.discard_nodes(nodes)
        self._decide(now_ns)

    def addresses_to_probe(self, now_ns: int) -> dict[str, str]:
        """Return the addresses at which to ask whether all nodes of the last round have ended, if none is expected."""
        is_forming = self.state.phase == JobPhase.FORMING
        return self.quorum.addresses_to_probe(now_ns, self._hoped_for()) if is_forming else {}

    def _hoped_for(self) -> AbstractSet[str]:
        return self._survivors.keys() | self._applicants.ids

    def _count_missing(self, here: Collection[str]) -> int:
        return self.quorum.count_missing(here, self.state.has_moved)

    # Decisions

    def _decide(self, now_ns: int) -> None:
        if not self.state.is_open:
            return
        is_forming = self.state.phase == JobPhase.FORMING
        # Even with too few nodes for a round: from now on those elsewhere are redirected here.
        if self.state.has_moved and not self._count_missing(
            self._applicants.ids if is_forming else self.quorum.present
        ):
            self.state = replace(self.state, has_moved=False)
            self.is_urgent = True
        (self._consider_beginning if is_forming else self._consider_late_nodes)(now_ns)

    def _stragglers(self) -> list[str]:
        return [node for node in self._survivors if node not in self._applicants.ids]

    def _has_stragglers(self) -> bool:
        return any(node not in self._applicants.ids for node in self._survivors)

    def _straggler_ns(self) -> int:
        # A heartbeat more, because the node measures the time by its own clock.
        longest_end_ns = self._rules.longest_end_ns + self._rules.heartbeat_ns
        return max(self._rules.last_call_ns, STRAGGLER_NS, longest_end_ns)

    def _consider_beginning(self, now_ns: int) -> None:
        rules = self._rules
        size = self._applicants.count_fitting(())
        if size < rules.min_nodes or not self._has_enough_slots(size):
            self._too_few = self._too_few or not self._are_enough(self._survivors.values())
            self._last_call_ns = None
            return
        if self._has_stragglers() and now_ns < self._formed_ns + self._straggler_ns():
            return
        if self._count_missing(self._applicants.ids):
            self._last_call_ns = None
            return
        if now_ns < self.leftover_workers.until_ns:
            return
        if size < rules.max_nodes and self._too_few:
            if self._last_call_ns is None:
                self._last_call_ns = now_ns + rules.last_call_ns
            if now_ns < self._last_call_ns:
                return
        self._begin_round(now_ns, self._fitting_nodes())

    def _has_enough_slots(self, size: int) -> bool:
        """Return whether the applicants that fit, `size` of them, have enough slots; cheap unless some do not fit."""
        least, applicants = self._rules.min_slots, self._applicants
        if applicants.slots < least or size == len(applicants.ids):
            return applicants.slots >= least
        return self._are_enough(self._fitting_nodes())

    def _fitting_nodes(self) -> list[Node]:
        return self._applicants.fitting_nodes((), self._survivors)

    def _are_enough(self, nodes: Collection[Node]) -> bool:
        rules = self._rules
        return len(nodes) >= rules.min_nodes and sum(node.slots for node in nodes) >= rules.min_slots

    def _begin_round(self, now_ns: int, nodes: Sequence[Node]) -> None:
        state = self.state
        assign = put_survivors_first if self._rules.gives_way else assign_group_ranks
        self.roster = assign(self.roster, nodes)
        for node in self._stragglers():
            self._detector.remove_node(node)
            self.departed.add(node)
        self._by_id = {node.id: node for node in self.roster}
        self.leftover_workers = LeftoverWorkers(self._rules)
        self._survivors = dict(self._by_id)
        for node in self._by_id:
            self._applicants.remove_node(node)
        self._detector.renew_nodes(now_ns, self._by_id)
        self.quorum = Quorum(self._rules, self._by_id)
        self._succeeded.clear()
        self._unsettled = None
        self._last_call_ns = None
        self._too_few = False
        parts = -(-len(self.roster) // PART_NODES)
        self.state = replace(
            state,
            phase=JobPhase.RUNNING,
            roster=RosterKey(state.term, state.number, parts),
            largest=max(state.largest, len(self.roster)),
            joined=len(self.roster),
            waiting=len(self._applicants.ids),
            spares=self._applicants.spares,
            has_moved=False,
            missing=0,
            alive=len(self.roster),
            previous=state.roster.number if state.roster else -1,
        )
        self.is_urgent = True

    def _consider_late_nodes(self, now_ns: int) -> None:
        budget = self.state.terms.max_changes
        is_spent = 0 <= budget <= self.state.changes
        fitting = self._applicants.count_fitting(self.roster)
        if not fitting or self._succeeded or self._unsettled or is_spent:
            self._last_call_ns = None
            return
        if self._last_call_ns is None:
            self._last_call_ns = now_ns + self._rules.last_call_ns
        size = len(self.roster) + fitting
        if size in (self._rules.max_nodes, self.state.largest) or now_ns >= self._last_call_ns:
            self._end_round(now_ns, NodesWaiting(fitting))

    def _end_round(self, now_ns: int, cause: Cause) -> None:
        """End the round, or close the job if the end exceeds the budget."""
        state = self.state
        if state.phase != JobPhase.RUNNING:
            return
        self._unsettled = None
        if isinstance(cause, WorkerFailed):
            if state.restarts >= state.terms.max_restarts:
                failure = cause.failure
                self._close_job(f"{failure.message} on {failure.host}", failure)
                return
            state = replace(state, restarts=state.restarts + 1)
        elif not isinstance(cause, ChangeRequested):
            if 0 <= state.terms.max_changes <= state.changes:
                assert isinstance(cause, NodesLost)
                limit = state.terms.max_changes
                self._close_job(
                    f"{cause.reason}, and the limit of changes of the nodes (--reset-limit) is {limit}"
                )
                return
            state = replace(state, changes=state.changes + 1)
        forming = replace(state, phase=JobPhase.FORMING, number=state.number + 1, cause=cause)
        self.state = replace(
            forming, joined=0, waiting=0, spares=(), missing=self._count_missing(self._hoped_for())
        )
        self._formed_ns = now_ns
        self._last_call_ns = None
        self._succeeded.clear()
        self._too_few = not self._are_enough(self._survivors.values())
        self.is_urgent = True
        self._decide(now_ns)

    def _close_job(self, reason: str, failure: Failure | None = None) -> None:
        self.state = replace(self.state, phase=JobPhase.CLOSED, reason=reason, failure=failure)
        self.is_urgent = True

    def _refuse_node(self, refused: Refused) -> None:
        self.state = replace(self.state, refused=(*self.state.refused, refused)[-REFUSALS:])
        self.is_urgent = True

    def _count_nodes(self, now_ns: int) -> None:
        """Update the counts that only inform users: once per reading, so that many arrivals cost few writes."""
        if self.state.phase == JobPhase.FORMING:
            self.state = replace(self.state, joined=len(self._applicants.ids))
            if now_ns >= self._informed_ns:
                self.state = replace(self.state, missing=self._count_missing(self._hoped_for()))
        elif self.state.phase == JobPhase.RUNNING:
            self.state = replace(
                self.state, waiting=len(self._applicants.ids), spares=self._applicants.spares
            )


def _names(hosts: Iterable[str]) -> str:
    listed = sorted(set(hosts))
    shown = ", ".join(listed[:4])
    return f"{shown} and {len(listed) - 4} more" if len(listed) > 4 else shown


# Places in the next round


class Applicants:
    """Nodes without a place in a round, in the order of their arrival."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nodes: dict[str, Node] = {}
        self.slots = 0  # of all applicants together; counted, because every arrival asks
        self._rivals: dict[str, int] = {}  # by node: since when its given rank is also that of another node

    @property
    def ids(self) -> KeysView[str]:
        """The ids of the applicants, in the order of their arrival."""
        return self._nodes.keys()

    @property
    def spares(self) -> tuple[str, ...]:
        """The ids of the applicants that may wait for a place without limit."""
        return tuple(self._nodes)[: self._rules.spares]

    def has_no_workers(self, node: str) -> bool:
        """Return whether this is an applicant whose workers have ended."""
        return node in self._nodes and not self._nodes[node].has_workers

    def add_node(self, node: Node) -> None:
        """Add an applicant, or replace its description."""
        before = self._nodes.get(node.id)
        self._nodes[node.id] = node
        self.slots += node.slots - (before.slots if before else 0)

    def remove_node(self, node: str) -> None:
        """Remove a node that has a place, or no longer asks for one."""
        if removed := self._nodes.pop(node, None):
            self.slots -= removed.slots

    def fitting_nodes(self, taken: Collection[Node], survivors: Collection[str] = ()) -> list[Node]:
        """Return the applicants that fit beside the nodes that have `taken` a place.

        `survivors` come first, then nodes with workers: a survivor that was lost for a moment.
        """
        ordered = sorted(
            self._nodes.values(), key=lambda node: (node.id not in survivors, not node.has_workers)
        )
        if not self._rules.places_are_given:
            return ordered[: self._places_left(taken)]
        places = {node.wish for node in taken}
        fitting = []
        for node in ordered:
            if node.wish not in places:
                places.add(node.wish)
                fitting.append(node)
        return fitting

    def count_fitting(self, taken: Collection[Node]) -> int:
        """Return how many applicants fit; cheap where places are not given, because every arrival asks."""
        if self._rules.places_are_given:
            return len(self.fitting_nodes(taken))
        return min(len(self._nodes), self._places_left(taken))

    def _places_left(self, taken: Collection[Node]) -> int:
        return max(self._rules.max_nodes - len(taken), 0)

    def reason_to_refuse(self, node: Node) -> str:
        """Return why this node can never get a place, or "" if it can."""
        if not self._rules.places_are_given or 0 <= node.wish < self._rules.max_nodes:
            return ""
        return f"its --node-rank {node.wish} is not within 0 to {self._rules.max_nodes - 1}"

    def refuse_rivals(self, now_ns: int, survivors: Iterable[Node], patience_ns: int) -> list[Refused]:
        """Remove nodes whose given rank has been another node's for longer than the patience, and return why."""
        refused: list[Refused] = []
        first: dict[int, Node] = {}
        for node in [*survivors, *self._nodes.values()] if self._rules.places_are_given else ():
            other = first.setdefault(node.wish, node)
            if other.id == node.id:
                self._rivals.pop(node.id, None)
            elif now_ns - self._rivals.setdefault(node.id, now_ns) > patience_ns:
                hosts = node.host if node.host == other.host else f"{other.host} and {node.host}"
                reason = f"two nodes have --node-rank {node.wish}, on {hosts}"
                del self._rivals[node.id]
                self.remove_node(node.id)
                refused.append(Refused(node.id, reason))
        return refused


def assign_group_ranks(last: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes by group rank. `last`: the last round's, by theirs; `nodes`: in the order of their arrival."""
    had = {node.id: place for place, node in enumerate(last)}
    size = len(nodes)
    places: dict[int, Node] = {}

    def take(place: int, node: Node) -> bool:
        if 0 <= place < size and place not in places:
            places[place] = node
            return True
        return False

    wishing = sorted(
        (node for node in nodes if node.wish >= 0), key=lambda node: had.get(node.id) != node.wish
    )
    left = [node for node in nodes if node.wish < 0]
    left += [node for node in wishing if not take(node.wish, node)]
    left = [node for node in left if not take(had.get(node.id, -1), node)]
    displaced = sorted((node for node in left if node.id in had), key=lambda node: had[node.id])
    newcomers = sorted((node for node in left if node.id not in had), key=_newcomers_order)
    holes = (place for place in range(size) if place not in places)
    places |= dict(zip(holes, [*displaced, *newcomers]))
    return tuple(places[place] for place in range(size))


def put_survivors_first(last: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes by group rank: those of the last round by theirs, then the newcomers, by wish and host."""
    had = {node.id: place for place, node in enumerate(last)}
    survivors = sorted((node for node in nodes if node.id in had), key=lambda node: had[node.id])
    newcomers = sorted(
        (node for node in nodes if node.id not in had),
        key=lambda node: (node.wish < 0, node.wish, *_newcomers_order(node)),
    )
    return (*survivors, *newcomers)


def _newcomers_order(node: Node) -> tuple[list[tuple[int, str]], str]:
    return host_order(node.host), node.host_id


def host_order(host: str) -> list[tuple[int, str]]:
    """Return the sorting key by which node2 comes before node10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", host) if part]
