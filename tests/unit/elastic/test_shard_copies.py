"""Shards and their copies through any sequence of commits, losses and joins: a simulation with true contents."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ronde.elastic import shard_copies
from ronde.elastic.shard_copies import (
    ShardContent,
    ShardCopies,
    holders,
    message_with,
    messages_in,
    plan_moves,
)
from ronde.errors import ProtocolError


def joined(buffers: Sequence[bytes | memoryview]) -> memoryview:
    return memoryview(bytearray().join(buffers))


def content(commit: int, text: str) -> ShardContent:
    return ShardContent(commit, "text", (memoryview(bytearray(text.encode())),))


def text_of(found: ShardContent) -> str:
    return b"".join(found.buffers).decode()


# Placement


def test_the_holder_is_on_another_host_if_there_is_one() -> None:
    assert holders(["a"]) == [-1]
    assert holders(["a", "a", "a"]) == [1, 2, 0]
    assert holders(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert holders(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert holders(["a", "a", "a", "b"]) == [3, 3, 3, 0]


def test_copies_are_spread_over_hosts_and_ranks() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        hosts = [chance.choice("abcd") for _ in range(chance.randint(2, 16))]
        found = holders(hosts)
        assert all(found[rank] != rank for rank in range(len(hosts)))
        if len(set(hosts)) > 1:
            assert all(hosts[holder] != hosts[rank] for rank, holder in enumerate(found))
            most = max(found.count(rank) for rank in range(len(hosts)))
            assert most <= max(-(-hosts.count(one) // hosts.count(other)) for one in hosts for other in hosts)


def test_moves_bring_each_shard_to_its_rank_and_holder() -> None:
    plan = plan_moves([{0: 5, 2: 5}, {1: 5, 0: 5}, {}], 3, 5, ["a", "a", "a"])
    assert plan.lost == ()
    assert {(shard, target) for shard, _, target in plan.moves} == {(1, 2), (2, 2)}
    assert plan_moves([{0: 5}, {1: 4}], 2, 5, ["a", "b"]).lost == (1,)


def test_all_ranks_get_all_shards_if_their_numbers_differ() -> None:
    plan = plan_moves([{0: 5, 1: 5}, {2: 5}], 3, 5, ["a", "b"])
    assert {(shard, target) for shard, _, target in plan.moves} == {(0, 1), (1, 1), (2, 0)}


def test_sources_share_the_work() -> None:
    plan = plan_moves([{0: 1, 1: 1, 2: 1, 3: 1}] * 2 + [{}, {}], 4, 1, ["a", "b", "a", "b"])
    sources = [source for _, source, _ in plan.moves]
    assert abs(sources.count(0) - sources.count(1)) <= 1


# Messages


def test_only_changed_pieces_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "PIECE_BYTES", 4)
    owner, holder = ShardCopies(), ShardCopies()
    lengths = []
    texts = ["aaaabbbbccccdd", "aaaabbbbXcccdd", "aaaabbbbXcccdY", "all is another", "all is anothe!"]
    for commit, text in enumerate(texts):
        owner.keep_previous()
        message = joined(owner.begin(0, content(commit, text)))
        lengths.append(sum(each.body.nbytes for each in messages_in(message)))
        holder.receive(messages_in(message))
        owner.accept()
        holder.accept()
        assert text_of(holder.content(0, commit)) == text
    assert lengths == [14, 4, 2, 14, 14]  # after a change of most pieces, none are compared for a while


def test_malformed_messages_are_refused() -> None:
    message = bytes(joined(message_with(0, content(1, "abc"))))
    for wrong in (message[:-1], message[:10], b"\xff" * 40):
        with pytest.raises(ProtocolError):
            list(messages_in(memoryview(wrong)))


# The simulation


class Process:
    def __init__(self, host: str) -> None:
        self.host = host
        self.copies = ShardCopies()


class JobStartsAgain(Exception):
    """Shards are lost: the newest durable snapshot is loaded."""


class Simulation:
    """Four ranks on some hosts; each has a shard, whose content is known for every commit that counts."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.num_hosts = self.chance.randint(1, 3)
        self.size = self.chance.randint(2, 5)
        self.truth: list[str] = []
        self.commit, self.attempt, self.num_starts = 0, 0, 0
        self.world: list[Process] = []
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        self.world = [Process(self.some_host()) for _ in range(self.size)]
        self.commit += 1
        self.truth = self.texts(self.commit)
        self.exchange(self.commit, self.truth, set())
        for process in self.world:
            process.copies.accept()
        self.note_settled()

    def some_host(self) -> str:
        return f"host-{self.chance.randrange(self.num_hosts)}"

    @property
    def hosts(self) -> list[str]:
        return [process.host for process in self.world]

    def texts(self, commit: int) -> list[str]:
        self.attempt += 1
        changes = self.chance.random() < 0.5
        return [f"shard {n} {'x' * 20} {self.attempt if changes else ''} {commit}" for n in range(self.size)]

    def note_settled(self) -> None:
        """From now on a shard is lost only if its owner and its holder die."""
        after = holders(self.hosts)
        self.copies_of = [{self.world[n], self.world[after[n]]} for n in range(self.size)]

    def victims(self) -> set[Process]:
        kind = self.chance.random()
        if kind < 0.5:
            return {self.chance.choice(self.world)}
        if kind < 0.8:
            host = self.some_host()
            return {process for process in self.world if process.host == host}
        return set(self.chance.sample(self.world, min(2, len(self.world))))

    # Commits

    def exchange(self, commit: int, texts: Sequence[str], dead: set[Process]) -> bool:
        """Return whether all have come to the barrier. With dead processes, any part of the exchange may happen."""
        after, messages = holders(self.hosts), {}
        arrived = True
        for rank, process in enumerate(self.world):
            if dead and self.chance.random() < 0.3:
                arrived = False
                continue
            process.copies.keep_previous()
            messages[rank] = joined(process.copies.begin(rank, content(commit, texts[rank])))
        for rank, message in messages.items():
            if dead and self.chance.random() < 0.3:
                arrived = False
            elif after[rank] >= 0:
                self.world[after[rank]].copies.receive(messages_in(message))
        return arrived

    def try_commit(self) -> None:
        commit = self.commit + 1
        texts = self.texts(commit)
        dead = self.victims() if self.chance.random() < 0.4 else set()
        passed = set()
        if self.exchange(commit, texts, dead):
            passed = {each for each in self.world if not dead or self.chance.random() < 0.5}
        for process in passed:
            process.copies.accept()
        if passed - dead:
            self.commit, self.truth = commit, texts
        if dead:
            self.recover(dead)
        else:
            self.note_settled()

    # Recovery

    def recover(self, dead: set[Process]) -> None:
        for process in set(self.world) - dead:
            process.copies.go_to(self.commit)
        while dead:
            self.world = [each for each in self.world if each not in dead]
            self.world += [Process(self.some_host()) for _ in range(self.size - len(self.world))]
            self.chance.shuffle(self.world)
            for shard, those in enumerate(self.copies_of):
                self.copies_of[shard] = those - dead
            dead = self.victims() if self.chance.random() < 0.2 else set()
            self.settle(bool(dead))

    def settle(self, is_interrupted: bool) -> None:
        inventories = [process.copies.inventory() for process in self.world]
        plan = plan_moves(inventories, self.size, self.commit, self.hosts)
        if plan.lost:
            assert all(not self.copies_of[shard] for shard in plan.lost), (
                "a shard is lost in spite of its copies"
            )
            raise JobStartsAgain
        arrived = []
        for shard, source, target in plan.moves:
            if not is_interrupted or self.chance.random() < 0.5:
                found = self.world[source].copies.content(shard, self.commit)
                arrived.append((target, joined(message_with(shard, found))))
        for target, message in arrived:
            self.world[target].copies.hold(messages_in(message))
        for rank, process in enumerate(self.world):
            if not is_interrupted or (rank in process.copies.inventory() and self.chance.random() < 0.5):
                process.copies.become(rank)
        if is_interrupted:
            return
        after = holders(self.hosts)
        for rank, process in enumerate(self.world):
            process.copies.prune(shard for shard, holder in enumerate(after) if holder == rank)
        self.note_settled()

    def check(self) -> None:
        after = holders(self.hosts)
        for shard, process in enumerate(self.world):
            own = process.copies.own
            assert own is not None
            assert (own.commit, text_of(own)) == (self.commit, self.truth[shard])
            if after[shard] >= 0:
                copy = self.world[after[shard]].copies.content(shard, self.commit)
                assert (copy.commit, text_of(copy)) == (self.commit, self.truth[shard])
            assert len(process.copies.inventory()) == 1 + after.count(shard)  # nothing is kept in vain

    def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.try_commit()
            except JobStartsAgain:
                self.start()
            self.check()


def run_simulations(seeds: range) -> int:
    starts = 0
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run(12)
        starts += simulation.num_starts - 1
    return starts


def test_no_shard_is_lost_while_its_rank_or_its_holder_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "PIECE_BYTES", 8)
    assert run_simulations(range(200)) > 0  # a rank and its holder die together now and then


@pytest.mark.slow
def test_in_many_simulations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "PIECE_BYTES", 8)
    run_simulations(range(1000, 3000))


def apply_at_once(copies: ShardCopies, messages: Any) -> None:
    for message in messages:
        copies._held[message.head.shard] = shard_copies._applied(
            message, copies._held.get(message.head.shard)
        )


def keep_nothing(copies: ShardCopies) -> None:
    pass


def forget_the_old_one(copies: ShardCopies, shard: int) -> None:
    if shard != copies.shard:
        copies.shard, copies.own = shard, copies._held[shard]
        copies._digests = shard_copies._Digests()


def keep_new_checksums(digests: Any) -> None:
    pass


def keep_copies(copies: ShardCopies, commit: int) -> None:
    if copies.own is not None and copies.own.commit > commit:
        copies.own = copies._previous
    copies.accept()


BUGS: dict[str, tuple[Any, str, Callable[..., Any]]] = {  # class, method, and the wrong one
    "copies are applied before the barrier": (ShardCopies, "receive", apply_at_once),
    "the commit before is not kept": (ShardCopies, "keep_previous", keep_nothing),
    "a shard is dropped before others have theirs": (ShardCopies, "become", forget_the_old_one),
    "checksums do not go back": (shard_copies._Digests, "discard", keep_new_checksums),
    "copies do not go back": (ShardCopies, "go_to", keep_copies),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_finds_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copies, "PIECE_BYTES", 8)
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((AssertionError, ProtocolError, KeyError, IndexError, ValueError)):
        run_simulations(range(1000, 3000))


def test_the_simulation_finds_copies_that_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "plan_moves", move_no_copies_of(plan_moves))
    with pytest.raises((AssertionError, KeyError)):
        run_simulations(range(100))


def move_no_copies_of(plan: Callable[..., Any]) -> Callable[..., Any]:
    def planned(*args: Any) -> Any:
        found = plan(*args)
        return found._replace(moves=tuple(move for move in found.moves if move.shard == move.target))

    return planned
