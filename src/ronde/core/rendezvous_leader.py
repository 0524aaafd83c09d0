"""What the leader decides: who is in a round, when it begins, why it ends, who is dead. Pure.

Rules

1. The first round waits until the minimum of nodes is there, then for the last call, but no longer than until it is
   full. So does a later one if too few were left. Otherwise a round begins as soon as all survivors of the last one
   have joined; one that does not come, though it lives, is left behind after the last call (at least `STRAGGLER_NS`).
2. A round ends at once when one of its nodes is lost, says that a worker failed, or leaves. The first of these to
   arrive is the cause. A failure that blames a peer waits for a better one: until every other node shows that it lives.
3. Late nodes wait. If there is room for them, the round ends for them: at once if that makes the world full or as large
   as it was before a loss, else after the last call, while the others work on. Not if somebody has already succeeded.
4. Ends for failed workers are counted as restarts, all others as changes. When a budget is spent the job is closed; for
   late nodes it is not, they go on waiting.
5. A node that succeeded and dies is no loss. When all have succeeded the job is completed.
6. A held key that is gone is a death at once. Silence is one after `missing_beats` heartbeats: beats are read twice per
   heartbeat, and once more before the judgement. A judge who overslept starts again.
7. Of two nodes with one given place, the later one is refused if both still live after the time of silence: before
   that, the first one may be what a restarted node was.
8. What a node says counts once (its `seq` grows), and only if it is about the present round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ronde.core.rendezvous_places import assign_places
from ronde.core.rendezvous_state import (
    PART_NODES,
    Beat,
    Cause,
    EndJob,
    Fail,
    Join,
    Leave,
    Message,
    Phase,
    Refused,
    RosterKey,
    Rules,
    State,
    Succeed,
)
from ronde.core.round import Failure, Node, NodesLost, NodesWaiting, WorkerFailed

__all__ = ["STRAGGLER_NS", "Leader"]

STRAGGLER_NS = 30 * 10**9  # for workers that do not want to end
NAMED_NODES = 32  # in the state, of those lost
REFUSALS = 16  # that are remembered


@dataclass(slots=True)
class _Pulse:
    beat: Beat | None
    seen_ns: int


@dataclass(slots=True)
class _Doubt:
    """A failure that blames a peer, and the nodes that have not shown yet that they live."""

    failure: Failure
    unheard: set[str]


class Leader:
    """The machine of one term. `state` is what should be written; `is_urgent` says that it must be, before more news.

    `roster` belongs to `state.roster`; the shell of the machine writes it first.
    """

    def __init__(self, rules: Rules, state: State, roster: Sequence[Node], now_ns: int) -> None:
        """`roster`: the nodes of the last round that began. `now_ns`: of any monotonic clock, always the same."""
        self.state = state
        self.roster = tuple(roster)
        self.is_urgent = False
        self._rules = rules
        self._by_id = {node.id: node for node in roster}
        self._survivors = {node.id: node for node in roster}  # not known to be dead
        self._wanting: dict[str, Node] = {}  # those who want in, in order of arrival
        self._succeeded: set[str] = set()
        self._seqs: dict[str, int] = {}
        self._pulses = {node.id: _Pulse(None, now_ns) for node in roster}
        self._doubt: _Doubt | None = None
        self._rivals: dict[str, int] = {}  # since when they want a place that another one has
        self._formed_ns = now_ns  # since when the present round is formed
        self._last_call_ns: int | None = None  # until when
        self._too_few = state.roster is None
        self._silence_ns = (2 * rules.missing_beats - 1) * rules.heartbeat_ns // 2
        self._read_ns = now_ns  # when beats are read next
        self._asked_ns = now_ns  # when they were read last
        self._judging: set[str] = set()
        self._ticked_ns = now_ns
        self.unwatched: set[str] = set(self._by_id)  # who came since this was cleared
        if state.phase == Phase.FORMING and isinstance(state.cause, NodesLost):
            for node in state.cause.nodes:
                self._survivors.pop(node.id, None)
                self._pulses.pop(node.id, None)
        self._decide(now_ns)

    # Who is looked after

    @property
    def nodes(self) -> Collection[str]:
        """The ids of all nodes whose lives matter."""
        return self._pulses.keys()

    @property
    def wake_ns(self) -> int:
        """When `tick` wants to be called."""
        deadline_ns = self._deadline_ns()
        return self._read_ns if deadline_ns is None else min(self._read_ns, deadline_ns)

    def tick(self, now_ns: int) -> bool:
        """Look at the clock. Returns whether the beats are to be read."""
        self._ticked_ns = now_ns
        self._decide(now_ns)
        if now_ns < self._read_ns:
            return False
        half_ns = max(self._rules.heartbeat_ns // 2, 1)
        if (
            now_ns - self._read_ns > self._rules.heartbeat_ns
        ):  # we slept, and know nothing of how long the others did
            for pulse in self._pulses.values():
                pulse.seen_ns = now_ns
        self._asked_ns, self._read_ns = now_ns, now_ns + half_ns
        self._refuse_rivals(now_ns)
        self._judging = {
            node for node, pulse in self._pulses.items() if now_ns - pulse.seen_ns >= self._silence_ns
        }
        self._count_lazily()
        return True

    def _deadline_ns(self) -> int | None:
        waits = (Phase.FORMING, Phase.RUNNING)
        deadlines = [self._last_call_ns] if self.state.phase in waits else []
        if self.state.phase == Phase.FORMING and self._stragglers():
            deadlines.append(self._formed_ns + self._straggler_ns())
        return min((each for each in deadlines if each is not None and each > self._ticked_ns), default=None)

    # What happens

    def hear_beats(self, now_ns: int, beats: Mapping[str, Beat | None], asked: Iterable[str]) -> None:
        """These beats have been read, of those `asked` for that were not the known ones."""
        for node, beat in beats.items():
            if pulse := self._pulses.get(node):
                is_news, pulse.beat = pulse.beat is not None, beat  # the first one may be old
                if is_news:
                    pulse.seen_ns = self._asked_ns
                self._hear_beat(now_ns, node, beat, is_news)
        if silent := self._judging & set(asked) - beats.keys():
            self._judging -= silent
            beats_s = self._rules.missing_beats * self._rules.heartbeat_ns / 1e9
            self.lose(now_ns, silent, f"was silent for {beats_s:g} s")

    def _hear_beat(self, now_ns: int, node: str, beat: Beat | None, is_news: bool) -> None:
        if self._doubt and is_news:
            self._doubt.unheard.discard(node)
        if beat is not None and beat.succeeded == self.state.number:
            self._note_success(node)
        self._settle_doubt(now_ns)

    def hear(self, now_ns: int, message: Message) -> None:
        """A node has said something."""
        sender = message.node.id if isinstance(message, Join) else message.id
        if message.seq <= self._seqs.get(sender, -1) or self.state.phase in (Phase.COMPLETED, Phase.CLOSED):
            return
        self._seqs[sender] = message.seq
        match message:
            case Join():
                self._hear_join(now_ns, message)
            case Fail(_, _, number, failure):
                if self._is_running(sender, number):
                    self._hear_failure(now_ns, sender, failure)
            case Succeed(_, _, number):
                if self._is_running(sender, number):
                    self._note_success(sender)
            case Leave(_, _, _, reason):
                self.lose(now_ns, {sender}, f"left: {reason}" if reason else "left")
            case EndJob(_, _, host, number, reason):
                if sender in self._survivors or sender in self._wanting or number == self.state.number:
                    self._close(f"{host}: {reason}")
        self._decide(now_ns)

    def _is_running(self, sender: str, number: int) -> bool:
        is_present = self.state.phase == Phase.RUNNING and number == self.state.number
        return is_present and sender in self._survivors

    def _hear_join(self, now_ns: int, join: Join) -> None:
        node = join.node
        state = self.state
        last = state.number if state.phase == Phase.RUNNING else state.number - 1
        if node.id in self._by_id and join.after < last:
            return  # said before the round that it was in
        if self._rules.places_are_given and not 0 <= node.wish < self._rules.max_nodes:
            self._refuse(node, f"its --node-rank {node.wish} is not within 0 to {self._rules.max_nodes - 1}")
            return
        if state.phase == Phase.RUNNING and node.id in self._survivors:
            self.lose(now_ns, {node.id}, "has given up the round")
        if self.state.phase == Phase.FORMING and join.after >= self.state.number:
            self.state = replace(self.state, number=join.after + 1)  # our store had lost its memory
        if self.state.phase in (Phase.FORMING, Phase.RUNNING):
            self._wanting[node.id] = node
            self._pulses[node.id] = _Pulse(None, now_ns)
            self.unwatched.add(node.id)

    def _hear_failure(self, now_ns: int, sender: str, failure: Failure) -> None:
        if failure.blames_peer and len(self.roster) > 1:
            if self._doubt is None:
                self._doubt = _Doubt(failure, self._by_id.keys() - self._succeeded)
            self._doubt.unheard.discard(sender)
            self._settle_doubt(now_ns)
        else:
            self._end(now_ns, WorkerFailed(failure))

    def _settle_doubt(self, now_ns: int) -> None:
        if self._doubt and not self._doubt.unheard:
            self._end(now_ns, WorkerFailed(self._doubt.failure))

    def _note_success(self, node: str) -> None:
        if self.state.phase == Phase.RUNNING and node in self._by_id:
            self._succeeded.add(node)
            if self._doubt:
                self._doubt.unheard.discard(node)
            if self._succeeded >= self._by_id.keys():
                self._doubt = None
                self.state = replace(self.state, phase=Phase.COMPLETED)
                self.is_urgent = True

    def lose(self, now_ns: int, nodes: Iterable[str], how: str) -> None:
        """These nodes are gone; `how` says in what way. Their last beats have been heard: they may have succeeded."""
        gone = [node for node in nodes if node in self._pulses]
        lost = [self._by_id[node] for node in gone if node in self._survivors and node not in self._succeeded]
        for node in gone:
            del self._pulses[node]
            self._survivors.pop(node, None)
            self._wanting.pop(node, None)
        if lost and self.state.phase == Phase.RUNNING:
            names = _names(node.host for node in lost)
            self._end(now_ns, NodesLost(tuple(lost[:NAMED_NODES]), f"{names} {how}"))
        self._decide(now_ns)

    # What is decided

    def _decide(self, now_ns: int) -> None:
        if self.state.phase == Phase.FORMING:
            self._consider_beginning(now_ns)
        elif self.state.phase == Phase.RUNNING:
            self._consider_late_nodes(now_ns)

    def _stragglers(self) -> list[str]:
        return [node for node in self._survivors if node not in self._wanting]

    def _straggler_ns(self) -> int:
        return max(self._rules.last_call_ns, STRAGGLER_NS)

    def _consider_beginning(self, now_ns: int) -> None:
        rules = self._rules
        size = self._count_fitting(())
        if size < rules.min_nodes or (rules.min_slots and not self._are_enough(self._fitting(()))):
            self._too_few = self._too_few or not self._are_enough(self._survivors.values())
            self._last_call_ns = None
            return
        if self._stragglers() and now_ns < self._formed_ns + self._straggler_ns():
            return
        if size < rules.max_nodes and self._too_few:
            if self._last_call_ns is None:
                self._last_call_ns = now_ns + rules.last_call_ns
            if now_ns < self._last_call_ns:
                return
        self._begin(now_ns, self._fitting(()))

    def _count_fitting(self, taken: Collection[Node]) -> int:
        """How many `_fitting` would return; asked for with everybody who comes."""
        if self._rules.places_are_given:
            return len(self._fitting(taken))
        return min(len(self._wanting), max(self._rules.max_nodes - len(taken), 0))

    def _are_enough(self, nodes: Collection[Node]) -> bool:
        rules = self._rules
        return len(nodes) >= rules.min_nodes and sum(node.slots for node in nodes) >= rules.min_slots

    def _fitting(self, taken: Collection[Node]) -> list[Node]:
        """Those who want in and find a place besides those who have one: survivors first, then by arrival."""
        ordered = sorted(self._wanting.values(), key=lambda node: node.id not in self._survivors)
        if self._rules.places_are_given:
            places = {node.wish for node in taken}
            fitting = []
            for node in ordered:
                if node.wish not in places:
                    places.add(node.wish)
                    fitting.append(node)
            return fitting
        return ordered[: max(self._rules.max_nodes - len(taken), 0)]

    def _refuse_rivals(self, now_ns: int) -> None:
        if not self._rules.places_are_given:
            return
        first: dict[int, Node] = {}
        for node in [*self._survivors.values(), *self._wanting.values()]:
            other = first.setdefault(node.wish, node)
            if other.id == node.id:
                self._rivals.pop(node.id, None)
            elif (
                now_ns - self._rivals.setdefault(node.id, now_ns)
                > self._silence_ns + self._rules.heartbeat_ns
            ):
                hosts = node.host if node.host == other.host else f"{other.host} and {node.host}"
                self._rivals.pop(node.id), self._wanting.pop(node.id), self._pulses.pop(node.id)
                self._refuse(node, f"two nodes say that they are --node-rank {node.wish}, on {hosts}")

    def _begin(self, now_ns: int, nodes: Sequence[Node]) -> None:
        state = self.state
        self.roster = assign_places(self.roster, nodes)
        for node in self._stragglers():
            del self._pulses[node]
        self._by_id = {node.id: node for node in self.roster}
        self._survivors = dict(self._by_id)
        for node in self._by_id:
            del self._wanting[node]
            self._pulses[node].seen_ns = now_ns
        self._succeeded.clear()
        self._doubt = None
        self._last_call_ns = None
        self._too_few = False
        parts = -(-len(self.roster) // PART_NODES)
        self.state = replace(
            state,
            phase=Phase.RUNNING,
            roster=RosterKey(state.term, state.number, parts),
            largest=max(state.largest, len(self.roster)),
            joined=len(self.roster),
            waiting=len(self._wanting),
            spares=self._spares(),
        )
        self.is_urgent = True

    def _consider_late_nodes(self, now_ns: int) -> None:
        budget = self.state.terms.max_changes
        is_spent = 0 <= budget <= self.state.changes
        fitting = self._count_fitting(self.roster)
        if not fitting or self._succeeded or self._doubt or is_spent:
            self._last_call_ns = None
            return
        if self._last_call_ns is None:
            self._last_call_ns = now_ns + self._rules.last_call_ns
        size = len(self.roster) + fitting
        if size in (self._rules.max_nodes, self.state.largest) or now_ns >= self._last_call_ns:
            self._end(now_ns, NodesWaiting(fitting))

    def _end(self, now_ns: int, cause: Cause) -> None:
        """End the round, or the job if that costs more than the budget."""
        state = self.state
        if state.phase != Phase.RUNNING:
            return
        self._doubt = None
        if isinstance(cause, WorkerFailed):
            if state.restarts >= state.terms.max_restarts:
                failure = cause.failure
                self._close(f"rank {failure.rank} on {failure.host} failed: {failure.message}", failure)
                return
            state = replace(state, restarts=state.restarts + 1)
        else:
            if 0 <= state.terms.max_changes <= state.changes:
                assert isinstance(cause, NodesLost)
                self._close(f"{cause.reason}, and the nodes may change {state.terms.max_changes} times only")
                return
            state = replace(state, changes=state.changes + 1)
        forming = replace(state, phase=Phase.FORMING, number=state.number + 1, cause=cause)
        self.state = replace(forming, joined=0, waiting=0, spares=())
        self._formed_ns = now_ns
        self._last_call_ns = None
        self._succeeded.clear()
        self._too_few = not self._are_enough(self._survivors.values())
        self.is_urgent = True
        self._decide(now_ns)

    def _close(self, reason: str, failure: Failure | None = None) -> None:
        self.state = replace(self.state, phase=Phase.CLOSED, reason=reason, failure=failure)
        self.is_urgent = True

    def _refuse(self, node: Node, reason: str) -> None:
        refused = (*self.state.refused, Refused(node.id, reason))[-REFUSALS:]
        self.state = replace(self.state, refused=refused)
        self.is_urgent = True

    def _spares(self) -> tuple[str, ...]:
        return tuple(self._wanting)[: self._rules.spares]

    def _count_lazily(self) -> None:
        """What is only for people: written with the next beats, so that many who come cost few writes."""
        if self.state.phase == Phase.FORMING:
            self.state = replace(self.state, joined=len(self._wanting))
        elif self.state.phase == Phase.RUNNING:
            self.state = replace(self.state, waiting=len(self._wanting), spares=self._spares())


def _names(hosts: Iterable[str]) -> str:
    listed = sorted(set(hosts))
    shown = ", ".join(listed[:4])
    return f"{shown} and {len(listed) - 4} more" if len(listed) > 4 else shown
