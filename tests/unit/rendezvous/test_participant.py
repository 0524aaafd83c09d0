"""A whole node: what it concludes when held keys are gone, when the store was away, and when its lease ends."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from tests.sim.rendezvous_store import SimStore

from ronde.rendezvous.effects import (
    Changes,
    Compare,
    Compared,
    Effect,
    Event,
    FindChanges,
    NotifyAgent,
    Pop,
    Popped,
    Probe,
    Probed,
    Set,
    Stored,
    Tick,
    Watch,
)
from ronde.rendezvous.membership import (
    Budget,
    Ejected,
    JobClosed,
    Node,
    NodesLost,
    RendezvousBroken,
    RendezvousEvent,
    RoundBegan,
    RoundEnded,
    Rules,
)
from ronde.rendezvous.participant import Participant
from ronde.rendezvous.state import STATE, decode_state

S = 10**9
RULES = Rules(min_nodes=1, max_nodes=3, last_call_ns=S, heartbeat_ns=5 * S)


class Shell:
    """A node whose operations take no time; `look` delivers the changes that it watches."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name
        self.participant = Participant(job.rules)
        self.watched: dict[str, bytes | None] = {}
        self.queue: str | None = None
        self.told: list[RendezvousEvent] = []
        self.held: dict[str, bytes] = {}
        self.operations: deque[Effect] = deque()
        self.is_busy = False
        self.is_cut_off = False
        self.join()

    def join(self) -> None:
        meeting = f"tcp:{self.name}:1"
        node = Node(self.name, f"host-{self.name}", "10.0.0.1", 1, "tcp:10.0.0.1:9", 1024, meeting=meeting)
        self.perform(self.participant.join(self.job.now_ns, node, Budget()))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case NotifyAgent(event):
                    self.told.append(event)
                case Watch(known):
                    self.watched = dict(known)
                case Pop(queue):
                    self.queue = queue
                case Probe(addresses):
                    self.job.probed.append(list(addresses))
                case _:
                    self.operations.append(effect)
        if not self.is_busy:
            self.is_busy = True
            while self.operations:
                self.do(self.operations.popleft())
            self.is_busy = False

    def do(self, effect: Effect) -> None:
        if self.is_cut_off:
            return
        result = self.job.store.execute(self.name, effect)
        if isinstance(effect, FindChanges):
            assert isinstance(result, dict)
            self.step(Changes(effect.known, result))
        elif isinstance(effect, Set):
            self.step(Stored(effect.values))
        elif isinstance(effect, Compare):
            assert isinstance(result, bytes)
            self.step(Compared(result))

    def step(self, event: Event) -> None:
        self.perform(self.participant.step(self.job.now_ns, event))

    def look(self) -> bool:
        """Deliver watched changes; return whether there were any."""
        values = self.job.store.queues.get(self.queue or "")
        changed = self.job.store.differing(self.watched)
        self.watched |= changed
        if changed:
            self.step(Changes({}, changed))
        if self.queue and values:
            self.step(Popped(self.queue, (values.popleft(),)))
        if is_due := self.participant.wake_ns <= self.job.now_ns:
            self.step(Tick())
        return bool(changed or values) or is_due

    def move(self, elsewhere: bool = True) -> None:
        """Go to the job's store, which is another one than before, or has lost its memory."""
        self.participant.lose_store(False)
        self.perform(self.participant.enter_store(self.job.now_ns, elsewhere=elsewhere))

    @property
    def version(self) -> int:
        assert self.participant.state
        return self.participant.state.version

    def hold_again(self) -> None:
        """Do what a store's client does after it has reconnected."""
        for key, value in self.held.items():
            self.job.store.held[self.name][key] = value
            self.job.store.put(key, value)


class Job:
    """Three nodes in a round that `a` leads."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules
        self.now_ns = 0
        self.probed: list[list[str]] = []  # the nodes whose agents were probed
        self.store = SimStore()
        self.nodes = [Shell(self, name) for name in "abc"]
        self.a, self.b, self.c = self.nodes
        self.settle()
        assert self.last_round() == ["a", "b", "c"]
        assert self.a.participant.is_leader

    def outlive_leases(self, *nodes: Shell) -> None:
        """Only these nodes go on while four heartbeats pass."""
        for _ in range(10):
            self.now_ns += 2 * S
            self.settle(*nodes)

    def last_round(self) -> list[str]:
        began = [event for event in self.a.told if isinstance(event, RoundBegan)]
        return [node.id for node in began[-1].round.nodes]

    def settle(self, *nodes: Shell) -> None:
        is_news = True
        while is_news:
            is_news = any(node.look() for node in nodes or self.nodes)

    def restart_store(self) -> None:
        for name, held in self.store.restart().items():
            next(node for node in self.nodes if node.name == name).held = dict(held)

    def lost(self) -> list[str]:
        causes = [event.cause for event in self.a.told if isinstance(event, RoundEnded)]
        return [node.id for cause in causes if isinstance(cause, NodesLost) for node in cause.nodes]


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_node_that_loses_its_connection_is_dead_at_once(job: Job) -> None:
    job.store.lose("b")
    job.settle(job.a, job.c)
    assert job.lost() == ["b"]


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_no_node_dies_because_the_store_was_away(job: Job, order: str) -> None:
    """In any order of returning and reading."""
    for _ in range(2):
        job.restart_store()
        for name in order:
            node = next(each for each in job.nodes if each.name == name)
            node.hold_again()
            job.settle(node)
        job.settle()
    assert job.lost() == []


def test_the_leader_notices_although_its_own_key_is_there_again(job: Job) -> None:
    job.restart_store()
    job.a.hold_again()
    job.settle(job.a)
    assert job.lost() == []
    assert job.a.participant.state is not None
    assert job.a.participant.state.term > 1  # all nodes repeat the requests that may be lost


def test_two_restarts_in_a_row_are_no_death_either(job: Job) -> None:
    job.restart_store()
    job.a.hold_again()
    assert job.a.look()
    job.restart_store()
    job.a.hold_again()
    job.settle(job.a)
    for node in (job.b, job.c):
        node.hold_again()
    job.settle()
    assert job.lost() == []


def test_a_node_seen_since_the_store_was_away_can_be_lost_at_once(job: Job) -> None:
    job.restart_store()
    for node in job.nodes:
        node.hold_again()
    job.settle()
    job.store.lose("b")
    job.settle(job.a, job.c)
    assert job.lost() == ["b"]


def test_a_node_that_does_not_come_back_is_lost_by_silence(job: Job) -> None:
    job.restart_store()
    job.a.hold_again()
    job.c.hold_again()
    job.settle(job.a, job.c)
    assert job.lost() == []
    for _ in range(10):
        job.now_ns += 2 * S
        job.settle(job.a, job.c)
    assert job.lost() == ["b"]


def test_nodes_that_have_moved_redirect_others_once_more_than_half_are_there() -> None:
    """A node that is called late may have begun a round elsewhere."""
    job = Job(replace(RULES, rehost=True))
    job.store = SimStore()
    job.a.move()
    job.settle(job.a)
    assert not job.a.participant.store_identity.is_redirecting
    job.b.move()
    job.settle(job.a, job.b)
    assert job.a.participant.store_identity.is_redirecting


def test_the_heartbeat_of_a_dead_node_goes_with_the_next_round(job: Job) -> None:
    job.store.lose("b")
    job.settle(job.a, job.c)
    assert "heartbeat/b" in job.store.values  # it may report a success
    for node in (job.a, job.c):
        node.join()
    job.outlive_leases(job.a, job.c)
    assert job.last_round() == ["a", "c"]
    assert {key for key in job.store.values if key.startswith("heartbeat/")} == {"heartbeat/a", "heartbeat/c"}


def test_a_lost_node_that_is_back_before_the_next_round_can_end_the_job(job: Job) -> None:
    job.outlive_leases(job.a, job.c)  # b is frozen
    assert job.lost() == ["b"]
    job.settle()
    for node in job.nodes:
        node.join()
    job.settle()
    assert sorted(job.last_round()) == ["a", "b", "c"]
    job.b.perform(job.b.participant.end_job("interrupted"))
    job.settle()
    assert JobClosed("host-b: interrupted") in job.a.told


def test_a_frozen_node_lets_the_others_restore_a_store_first(job: Job) -> None:
    job.outlive_leases(job.a, job.c)  # b is frozen
    job.a.join()
    job.c.join()
    job.outlive_leases(job.a, job.c)
    assert job.last_round() == ["a", "c"]

    job.store = SimStore()
    job.b.step(Tick())
    job.b.move(elsewhere=False)
    job.settle(job.b)
    assert STATE not in job.store.values
    job.a.move(elsewhere=False)
    job.c.move(elsewhere=False)
    job.now_ns += 5 * S
    job.settle()
    assert job.lost() == ["b"], "a and c go on"
    assert any(isinstance(event, Ejected) for event in job.b.told)


def test_a_node_that_has_written_often_follows_a_later_round_of_a_lower_version(job: Job) -> None:
    job.outlive_leases(job.a, job.c)  # b is frozen
    job.a.join()
    job.c.join()
    job.outlive_leases(job.a, job.c)
    assert job.last_round() == ["a", "c"]

    for _ in range(9):  # a store that loses its data, again and again
        job.store = SimStore()
        job.b.move(elsewhere=False)
        job.now_ns += 5 * S
        job.settle(job.b)
    job.store = SimStore()
    for node in (job.a, job.c):
        node.move(elsewhere=False)
    for _ in range(2):
        job.now_ns += 5 * S
        job.settle(job.a, job.c)
    assert decode_state(job.store.values[STATE]).version < job.b.version
    job.b.move(elsewhere=False)
    job.settle()
    assert any(isinstance(event, Ejected) for event in job.b.told)
    assert job.b.version == job.a.version


def test_a_frozen_node_that_is_alone_goes_on_a_heartbeat_later(job: Job) -> None:
    job.now_ns += 20 * S
    job.store = SimStore()
    for node in job.nodes:
        node.step(Tick())
        node.move(elsewhere=False)
    job.settle()
    assert STATE not in job.store.values
    job.now_ns += 5 * S
    job.settle()
    assert STATE in job.store.values
    assert job.lost() == []


def test_a_lease_runs_out_also_without_a_store(job: Job) -> None:
    """The workers may still be saving something, and are killed before those of the others start."""
    participant = job.a.participant
    assert [
        type(effect.event) for effect in participant.give_up("lost") if isinstance(effect, NotifyAgent)
    ] == [RendezvousBroken]

    def told(at_ns: int) -> list[bool]:
        effects = participant.step(at_ns, Tick())
        events = [effect.event for effect in effects if isinstance(effect, NotifyAgent)]
        return [event.is_unsure for event in events if isinstance(event, Ejected)]

    assert told(RULES.silence_ns - 1) == []
    assert participant.wake_ns <= RULES.silence_ns
    assert told(RULES.silence_ns) == [True]
    assert told(RULES.silence_ns + 1) == []


def leaving(job: Job) -> Job:
    """`b` leaves, with workers that may take 30 s to end, and the others ask for the next round."""
    job.b.perform(job.b.participant.leave("preempted", 30 * S))
    job.settle()
    job.a.join()
    job.c.join()
    for _ in range(12):
        job.now_ns += 2 * S
        job.settle()
    assert not any(isinstance(event, Ejected) for event in job.b.told), "its workers may save what they have"
    assert job.last_round() == ["a", "b", "c"]
    return job


def test_the_others_wait_until_the_agent_of_a_node_that_leaves_has_ended(job: Job) -> None:
    leaving(job).store.lose("b")
    job.settle(job.a, job.c)
    assert job.probed == [["b"]]
    job.a.step(Probed(("b",), is_late=True))
    job.settle(job.a, job.c)
    assert job.last_round() == ["a", "c"]


def test_the_others_wait_for_a_node_that_leaves_no_longer_than_its_workers_may_take(job: Job) -> None:
    leaving(job)
    for _ in range(6):  # 36 s after the notice; the workers have ended after 30 s
        job.now_ns += 2 * S
        job.settle()
    assert job.last_round() == ["a", "c"]


def test_a_node_that_is_cut_off_while_it_leaves_has_its_lease_and_no_more(job: Job) -> None:
    leaving(job).now_ns += RULES.silence_ns
    job.b.step(Tick())
    assert isinstance(job.b.told[-1], Ejected)


def ended(job: Job) -> Job:
    """The round has ended because `b` left; the workers of `a` and `c` may still be ending."""
    job.b.perform(job.b.participant.leave("preempted", 0))
    job.settle()
    assert isinstance(job.c.told[-1], RoundEnded)
    return job


def test_workers_that_outlive_their_round_have_the_lease_and_no_more(job: Job) -> None:
    ended(job).c.is_cut_off = True
    job.now_ns += RULES.silence_ns - 1
    job.c.step(Tick())
    assert isinstance(job.c.told[-1], RoundEnded)
    assert job.c.participant.wake_ns <= RULES.silence_ns
    job.now_ns += 1
    job.c.step(Tick())
    assert isinstance(job.c.told[-1], Ejected)


def test_workers_that_outlive_their_round_end_when_the_next_one_begins(job: Job) -> None:
    ended(job)
    job.a.join()
    for _ in range(20):
        job.now_ns += 2 * S
        job.settle(job.a, job.c)
    assert job.last_round() == ["a"]
    assert isinstance(job.c.told[-1], Ejected)


@pytest.mark.parametrize("has_joined", [True, False], ids=["has joined", "at the end of the job"])
def test_no_lease_runs_where_no_workers_are_or_follow(job: Job, has_joined: bool) -> None:
    ended(job)
    if has_joined:
        job.c.join()
    else:
        job.a.perform(job.a.participant.end_job("interrupted"))
    job.settle()
    job.now_ns += RULES.silence_ns
    job.c.step(Tick())
    assert not any(isinstance(event, Ejected) for event in job.c.told)
