"""Runs the simulated rendezvous, and makes sure that it would notice if the machines were wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
from tests.sim.common_order import Broken
from tests.sim.rendezvous import draw_nodes, main, simulate
from tests.sim.rendezvous_store import SimStore, Values

from ronde.rendezvous import leader, state
from ronde.rendezvous.effects import Compare, Effect
from ronde.rendezvous.leader import Leader
from ronde.rendezvous.leader_inbox import LeaderInbox
from ronde.rendezvous.liveness import Liveness
from ronde.rendezvous.member import Member
from ronde.rendezvous.membership import Node
from ronde.rendezvous.participant import Participant
from ronde.rendezvous.state import JobPhase, JobState, JoinRequest, Message, RosterKey, StateReplica

BATCH = 75
WHAT_HAPPENS = {
    "a node dies",
    "a node ends the job",
    "a node freezes",
    "a node is without power",
    "a node leaves",
    "a node loses its connection",
    "ejected",
    "failures",
    "late nodes",
    "nodes: closed",
    "nodes: not needed",
    "nodes: succeeded",
    "rounds",
    "rounds ended by losses",
    "the leader dies",
    "the leader ends the job",
    "the leader freezes",
    "the leader is without power",
    "the leader leaves",
    "the leader loses its connection",
    "the store is lost",
    "the store restarts",
}


@pytest.mark.parametrize(
    "first", [pytest.param(i * BATCH, marks=[pytest.mark.slow] if i else []) for i in range(4)]
)
def test_some_hundred_seeds_with_up_to_30_nodes(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        counts += simulate(seed, draw_nodes(seed))
    assert set(counts) >= WHAT_HAPPENS, "the simulations have become dull"


@pytest.mark.slow
def test_200_nodes() -> None:
    simulate(3, 200)


@pytest.mark.slow
def test_400_nodes() -> None:
    simulate(1, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 24])
def test_1000_nodes_and_all_that_may_happen(seed: int) -> None:
    simulate(seed, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 11_000, 250))
def test_1000_more_seeds(first: int) -> None:
    for seed in range(first, first + 250):
        simulate(seed, draw_nodes(seed))


def test_a_seed_tells_the_same_story_again(capsys: pytest.CaptureFixture[str]) -> None:
    stories = []
    for _ in range(2):
        assert main(["--seed", "7", "--nodes", "5"]) == 0
        stories.append(capsys.readouterr().out)
    assert stories[0] == stories[1]
    assert stories[0].startswith("1 simulations:")


# Machines, and a store, that are wrong in one way.


def write_without_comparing(patch: pytest.MonkeyPatch) -> None:
    execute = SimStore.execute

    def broken(self: SimStore, client: str, effect: Effect) -> Values | bytes | None:
        if isinstance(effect, Compare):
            effect = Compare(self.values.get("state", b""), effect.desired)
        return execute(self, client, effect)

    patch.setattr(SimStore, "execute", broken)


def never_say_anything_again(patch: pytest.MonkeyPatch) -> None:
    request_place = Member._request_place

    def broken(self: Member, state: JobState, after: int) -> None:
        if self._requested is None:
            request_place(self, state, after)

    patch.setattr(Member, "_request_place", broken)


def keep_dead_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "lose_nodes", lambda self, now_ns, nodes, how, may_work=False: None)


def lose_once_more_who_has_come_back(patch: pytest.MonkeyPatch) -> None:
    lose, tick = Leader.lose_nodes, Leader.tick
    lost: WeakKeyDictionary[Leader, set[str]] = WeakKeyDictionary()

    def lose_and_remember(
        self: Leader, now_ns: int, nodes: Iterable[str], how: str, may_work: bool = False
    ) -> None:
        gone = set(nodes)
        lost.setdefault(self, set()).update(gone)
        lose(self, now_ns, gone, how, may_work)

    def broken(self: Leader, now_ns: int) -> bool:
        again = lost.get(self, set()) & self._by_id.keys()
        if again and self.state.phase == JobPhase.RUNNING:
            lost.pop(self)
            lose(self, now_ns, again, "was lost before")
        return tick(self, now_ns)

    patch.setattr(Leader, "lose_nodes", lose_and_remember)
    patch.setattr(Leader, "tick", broken)


def follow_a_lost_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "_take_over", lambda self: None)


def forget_silent_nodes(patch: pytest.MonkeyPatch) -> None:
    hear = Leader.note_heartbeats

    def broken(self: Leader, now_ns: int, heartbeats: dict[str, object], asked: set[str]) -> None:
        hear(self, now_ns, heartbeats, set())  # type: ignore[arg-type]

    patch.setattr(Leader, "note_heartbeats", broken)


def deal_out_places_anew(patch: pytest.MonkeyPatch) -> None:
    def broken(last: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(sorted(nodes, key=lambda node: node.id[::-1]))

    patch.setattr(leader, "assign_group_ranks", broken)


def give_a_place_to_two(patch: pytest.MonkeyPatch) -> None:
    begin = Leader._begin_round

    def broken(self: Leader, now_ns: int, nodes: Sequence[Node]) -> None:
        begin(self, now_ns, nodes)
        if len(self.roster) > 2:
            self.roster = (*self.roster[:-1], self.roster[0])

    patch.setattr(Leader, "_begin_round", broken)


def let_terms_write_to_one_roster(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RosterKey, "prefix", property(lambda self: f"roster/{self.number}/"))


def complete_with_the_first(patch: pytest.MonkeyPatch) -> None:
    note = Leader._note_success

    def broken(self: Leader, node: str) -> None:
        for each in list(self._by_id):
            note(self, each)

    patch.setattr(Leader, "_note_success", broken)


def restart_for_ever(patch: pytest.MonkeyPatch) -> None:
    end = Leader._end_round

    def broken(self: Leader, now_ns: int, cause: state.Cause) -> None:
        terms = self.state.terms
        self.state = replace(self.state, terms=replace(terms, max_restarts=10**6, max_changes=-1))
        end(self, now_ns, cause)
        self.state = replace(self.state, terms=terms)

    patch.setattr(Leader, "_end_round", broken)


def take_every_join_for_a_new_one(patch: pytest.MonkeyPatch) -> None:
    handle_join = Leader._handle_join

    def broken(self: Leader, now_ns: int, join: JoinRequest) -> None:
        handle_join(self, now_ns, replace(join, after=10**6))

    patch.setattr(Leader, "_handle_join", broken)
    hear = Leader.handle_message

    def handle_again(self: Leader, now_ns: int, message: Message) -> None:
        self._seqs.clear()
        hear(self, now_ns, message)

    patch.setattr(Leader, "handle_message", handle_again)


def write_before_the_last_write_is_seen(patch: pytest.MonkeyPatch) -> None:
    write = StateReplica.write_state

    def broken(self: StateReplica, state: JobState, roster: tuple[Node, ...] | None = None) -> list[Effect]:
        effects = write(self, state, roster)
        if self.state and self.state.leader == state.leader:
            self.raw, self.state, self.writing = self.writing or b"", state, None
        return effects

    patch.setattr(StateReplica, "write_state", broken)


def believe_a_store_that_was_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "has_lost_sentinel", lambda self, changed: False)


def believe_that_those_who_never_showed_are_lost(patch: pytest.MonkeyPatch) -> None:
    init = LeaderInbox.__init__

    def broken(self: LeaderInbox, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        self._seen_alive |= self.leader.nodes

    patch.setattr(LeaderInbox, "__init__", broken)


def leave_the_end_to_the_leader(patch: pytest.MonkeyPatch) -> None:
    end_job = Participant._end_job
    patch.setattr(Participant, "_end_job", lambda self: end_job(self) if self.is_leader else None)


def end_what_has_gone_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_has_gone_on", lambda self, state, ending: False)


FIRST_SEEDS: dict[Callable[[pytest.MonkeyPatch], None], int] = {  # of the bugs that show late
    write_without_comparing: 35,
    lose_once_more_who_has_come_back: 15,
    believe_that_those_who_never_showed_are_lost: 70,
    end_what_has_gone_on: 95,
}
BUGS = [
    write_without_comparing,
    never_say_anything_again,
    keep_dead_nodes,
    lose_once_more_who_has_come_back,
    follow_a_lost_leader,
    forget_silent_nodes,
    deal_out_places_anew,
    give_a_place_to_two,
    let_terms_write_to_one_roster,
    complete_with_the_first,
    restart_for_ever,
    take_every_join_for_a_new_one,
    write_before_the_last_write_is_seen,
    believe_a_store_that_was_away,
    believe_that_those_who_never_showed_are_lost,
    leave_the_end_to_the_leader,
    end_what_has_gone_on,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_caught_and_can_be_replayed(
    bug: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bug(monkeypatch)
    assert main(["--seeds", "400", "--from", str(FIRST_SEEDS.get(bug, 0))]) == 1, "nobody has noticed"
    story = capsys.readouterr().out
    replay = re.search(r"^replay: python -m tests.sim.rendezvous --seed (\d+) --nodes (\d+)$", story, re.M)
    assert replay
    with pytest.raises(Broken) as caught:
        simulate(int(replay[1]), int(replay[2]))
    assert str(caught.value) == story.rstrip("\n")
