"""What the leader decides: who is in a round, when it begins, why it ends, who is dead. Pure.

Rules

1. The first round waits until the minimum of nodes is there, then for the last call, but no longer than until it is
   full. So does a later one if too few were left. Otherwise a round begins as soon as all survivors of the last one
   have joined; one that does not come, though it lives, is left behind after the last call (at least `STRAGGLER_NS`),
   and not before its workers have ended.
2. A round ends at once when one of its nodes is lost, says that a worker failed, or leaves. The first of these to
   arrive is the cause. A failure that blames a peer waits for a better one: until every other node shows that it lives.
3. Late nodes wait. If there is room for them, the round ends for them: at once if that makes the world full or as large
   as it was before a loss, else after the last call, while the others work on. Not if somebody has already succeeded.
4. Ends for failed workers are counted as restarts, all others as changes. When a budget is spent the job is closed; for
   late nodes it is not, they go on waiting.
5. A node that succeeded and dies is no loss. When all have succeeded the job is completed.
6. A held key that is gone is a death at once. Silence is one after `missing_heartbeats` heartbeats (`detector`).
7. Survivors get a place before others do; who cannot have one is refused (`applicants`).
8. Where others may go on elsewhere, a round begins with enough nodes of the last one only (`quorum`). It begins when no
   lost node can have workers any more (`lease`).
9. What a node says counts once (its `seq` grows), and only if it is about the present round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from ronde.core.rank_set import RankSet
from ronde.core.rendezvous.applicants import Applicants
from ronde.core.rendezvous.failure_detector import FailureDetector
from ronde.core.rendezvous.group_ranks import assign_group_ranks
from ronde.core.rendezvous.lease import LeftoverWorkers
from ronde.core.rendezvous.membership import Failure, Node, NodesLost, NodesWaiting, WorkerFailed
from ronde.core.rendezvous.quorum import Quorum
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import (
    PART_NODES,
    Cause,
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

__all__ = ["STRAGGLER_NS", "Leader"]

STRAGGLER_NS = 30 * 10**9  # for workers that do not want to end
NAMED_NODES = 32  # in the state, of those lost
REFUSALS = 16  # that are remembered


@dataclass(slots=True)
class _Doubt:
    """A failure that blames a peer, and the nodes that have not shown yet that they live."""

    failure: Failure
    unconfirmed: set[str]


class Leader:
    """The machine of one term. `state` is what should be written; `is_urgent` says that it must be, before more news.

    `roster` belongs to `state.roster`; the shell of the machine writes it first.
    """

    def __init__(self, rules: Rules, state: JobState, roster: Sequence[Node], now_ns: int) -> None:
        """`roster`: the nodes of the last round that began. `now_ns`: of any monotonic clock, always the same."""
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
        self.departed: set[str] = set()  # who has gone, and left a heartbeat that may still have to be read
        self._seqs: dict[str, int] = {}
        self._detector = FailureDetector(rules, self._by_id, now_ns)
        self.leftover_workers = LeftoverWorkers(rules)
        self._doubt: _Doubt | None = None
        self._formed_ns = now_ns  # since when the present round is formed
        self._last_call_ns: int | None = None  # until when
        self._too_few = state.roster is None
        # Until then the last leader knew more of who is missing.
        self._informed_ns = now_ns + rules.silence_ns
        self._ticked_ns = now_ns
        self.unwatched: set[str] = set(self._by_id)  # who came since this was cleared
        if state.phase == JobPhase.FORMING and isinstance(state.cause, NodesLost):
            for node in state.cause.ids(self.roster):
                self.leftover_workers.add_lost_node(node, now_ns)
                self._survivors.pop(node, None)
                self._detector.remove_node(node)
                self.departed.add(node)
        self._decide(now_ns)

    # Who is looked after

    @property
    def nodes(self) -> KeysView[str]:
        """The ids of all nodes whose lives matter."""
        return self._detector.nodes

    @property
    def wake_ns(self) -> int:
        """When `tick` wants to be called."""
        deadline_ns = self._deadline_ns()
        read_ns = self._detector.read_ns
        return read_ns if deadline_ns is None else min(read_ns, deadline_ns)

    def tick(self, now_ns: int) -> bool:
        """Look at the clock. Returns whether the heartbeats are to be read."""
        self._ticked_ns = now_ns
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

    # What happens

    def note_heartbeats(
        self, now_ns: int, heartbeats: Mapping[str, Heartbeat | None], asked: Iterable[str]
    ) -> None:
        """These heartbeats have been read, of those `asked` for that were not the known ones."""
        for node, heartbeat in heartbeats.items():
            if node in self._detector.nodes:
                shows_life = self._detector.note_heartbeat(now_ns, node, heartbeat)
                if shows_life:
                    self.quorum.note_present((node,))
                self._note_heartbeat(now_ns, node, heartbeat, shows_life)
        if silent := self._detector.confirm_silence(asked, heartbeats):
            self.lose_nodes(
                now_ns, silent, f"was silent for {self._rules.silence_ns / 1e9:g} s", may_work=True
            )

    def note_present(self, now_ns: int, nodes: Collection[str]) -> None:
        """These nodes hold their keys here."""
        self.quorum.note_present(nodes)
        if self.state.has_moved:
            self._decide(now_ns)

    def _note_heartbeat(self, now_ns: int, node: str, heartbeat: Heartbeat | None, shows_life: bool) -> None:
        if self._doubt and shows_life:
            self._doubt.unconfirmed.discard(node)
        if heartbeat is not None and heartbeat.succeeded == self.state.number:
            self._note_success(node)
        self._settle_doubt(now_ns)

    def handle_message(self, now_ns: int, message: Message) -> None:
        """A node has said something."""
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
            case LeaveNotice(_, _, _, reason, ends_within_ns):
                self.quorum.note_ended({sender})
                self.departed.add(sender)
                if not ends_within_ns:
                    self.leftover_workers.discard_nodes({sender})
                elif sender in self._by_id and sender not in self._leaving:
                    self._leaving.add(sender)  # what it says again is as old
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
            return  # said before the round that it was in
        if reason := self._applicants.reason_to_refuse(node):
            self._refuse_node(Refused(node.id, reason))
            return
        if state.phase == JobPhase.RUNNING and node.id in self._survivors:
            self.lose_nodes(now_ns, {node.id}, "has given up the round")
        if self.state.phase == JobPhase.FORMING and join.after >= self.state.number:
            self.state = replace(self.state, number=join.after + 1)  # our store had lost its memory
        if self.state.phase in (JobPhase.FORMING, JobPhase.RUNNING):
            self._applicants.add_node(node)
            self.leftover_workers.discard_nodes({node.id})
            is_promised = self.state.roster is not None and self.state.roster.number == join.promised
            self.quorum.note_promise(node.id, is_promised)
            self.departed.discard(node.id)
            self._detector.add_node(now_ns, node.id)
            self.unwatched.add(node.id)

    def _handle_failure(self, now_ns: int, sender: str, failure: Failure) -> None:
        if failure.blames_peer and len(self.roster) > 1:
            if self._doubt is None:
                self._doubt = _Doubt(failure, self._by_id.keys() - self._succeeded)
            self._doubt.unconfirmed.discard(sender)
            self._settle_doubt(now_ns)
        elif self._rules.gives_way and self.state.restarts >= self.state.terms.max_restarts:
            # Those of other nodes may be its consequences.
            self.lose_nodes(now_ns, {sender}, f"left: {failure.message}", may_work=True)
        else:
            self._end_round(now_ns, WorkerFailed(failure))

    def _settle_doubt(self, now_ns: int) -> None:
        if self._doubt and not self._doubt.unconfirmed:
            self._end_round(now_ns, WorkerFailed(self._doubt.failure))

    def _note_success(self, node: str) -> None:
        if self.state.phase == JobPhase.RUNNING and node in self._by_id:
            self._succeeded.add(node)
            if self._doubt:
                self._doubt.unconfirmed.discard(node)
            if self._succeeded >= self._by_id.keys():
                self._doubt = None
                self.state = replace(self.state, phase=JobPhase.COMPLETED)
                self.is_urgent = True

    def lose_nodes(self, now_ns: int, nodes: Iterable[str], how: str, may_work: bool = False) -> None:
        """These nodes are gone; `how` says in what way, and `may_work` that nobody knows whether their workers are.

        Their last heartbeats have been heard: they may have succeeded.
        """
        gone = [node for node in nodes if node in self._detector.nodes]
        lost = [self._by_id[node] for node in gone if node in self._survivors and node not in self._succeeded]
        for each in lost if may_work else ():
            if each.id not in self._applicants.ids:
                self.leftover_workers.add_lost_node(each.id, self._detector.last_heartbeat_ns(each.id))
        for node in gone:
            self._detector.remove_node(node)
            self._survivors.pop(node, None)
            self._applicants.remove_node(node)
        self.departed.update(gone)
        if lost and self.state.phase == JobPhase.RUNNING:
            hosts = {node.host for node in lost}
            what = f"were {how.removeprefix('was ')}" if len(hosts) > 1 and how.startswith("was ") else how
            ranges = self._rank_ranges(lost) if len(lost) > NAMED_NODES else ()
            self._end_round(now_ns, NodesLost(tuple(lost[:NAMED_NODES]), f"{_names(hosts)} {what}", ranges))
        self._decide(now_ns)

    def _rank_ranges(self, lost: Collection[Node]) -> tuple[int, ...]:
        """The group ranks of these nodes of the roster, in pairs of first and last."""
        ids = {node.id for node in lost}
        ranks = RankSet.of(rank for rank, node in enumerate(self.roster) if node.id in ids)
        return tuple(rank for pair in ranks.ranges for rank in pair)

    # Whether others may go on elsewhere

    def note_agents_ended(self, now_ns: int, nodes: Collection[str], how: str) -> None:
        """The agents of these nodes have ended for certain, and before they could go elsewhere."""
        self.quorum.note_ended(nodes)
        self.leftover_workers.discard_nodes(nodes)
        self.lose_nodes(now_ns, nodes, how)

    def note_workers_ended(self, now_ns: int, nodes: Collection[str]) -> None:
        """The agents of these nodes have ended, whatever they have done since they were lost."""
        self.leftover_workers.discard_nodes(nodes)
        self._decide(now_ns)

    def addresses_to_probe(self, now_ns: int) -> dict[str, str]:
        """Where to find out whether all of the last round have ended, if not one of them is here."""
        is_forming = self.state.phase == JobPhase.FORMING
        return self.quorum.addresses_to_probe(now_ns, self._hoped_for()) if is_forming else {}

    def _hoped_for(self) -> AbstractSet[str]:
        return self._survivors.keys() | self._applicants.ids

    def _count_missing(self, here: Collection[str]) -> int:
        return self.quorum.count_missing(here, self.state.has_moved)

    # What is decided

    def _decide(self, now_ns: int) -> None:
        if not self.state.is_open:
            return
        is_forming = self.state.phase == JobPhase.FORMING
        # Also where too few are here for a round: those who are wanted find them by this.
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
        longest_end_ns = self._rules.longest_end_ns + self._rules.heartbeat_ns  # it began by another clock
        return max(self._rules.last_call_ns, STRAGGLER_NS, longest_end_ns)

    def _consider_beginning(self, now_ns: int) -> None:
        rules = self._rules
        size = self._applicants.count_fitting(())
        if size < rules.min_nodes or (rules.min_slots and not self._are_enough(self._fitting_nodes())):
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

    def _fitting_nodes(self) -> list[Node]:
        return self._applicants.fitting_nodes((), self._survivors)

    def _are_enough(self, nodes: Collection[Node]) -> bool:
        rules = self._rules
        return len(nodes) >= rules.min_nodes and sum(node.slots for node in nodes) >= rules.min_slots

    def _begin_round(self, now_ns: int, nodes: Sequence[Node]) -> None:
        state = self.state
        self.roster = assign_group_ranks(self.roster, nodes)
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
        self._doubt = None
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
        )
        self.is_urgent = True

    def _consider_late_nodes(self, now_ns: int) -> None:
        budget = self.state.terms.max_changes
        is_spent = 0 <= budget <= self.state.changes
        fitting = self._applicants.count_fitting(self.roster)
        if not fitting or self._succeeded or self._doubt or is_spent:
            self._last_call_ns = None
            return
        if self._last_call_ns is None:
            self._last_call_ns = now_ns + self._rules.last_call_ns
        size = len(self.roster) + fitting
        if size in (self._rules.max_nodes, self.state.largest) or now_ns >= self._last_call_ns:
            self._end_round(now_ns, NodesWaiting(fitting))

    def _end_round(self, now_ns: int, cause: Cause) -> None:
        """End the round, or the job if that costs more than the budget."""
        state = self.state
        if state.phase != JobPhase.RUNNING:
            return
        self._doubt = None
        if isinstance(cause, WorkerFailed):
            if state.restarts >= state.terms.max_restarts:
                failure = cause.failure
                self._close_job(f"{failure.message} on {failure.host}", failure)
                return
            state = replace(state, restarts=state.restarts + 1)
        else:
            if 0 <= state.terms.max_changes <= state.changes:
                assert isinstance(cause, NodesLost)
                self._close_job(
                    f"{cause.reason}, and the nodes may change {state.terms.max_changes} times only"
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
        """What is only for people: written with the next heartbeats, so that many who come cost few writes."""
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
