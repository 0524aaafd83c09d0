"""`ElasticSampler`: no sample is lost or repeated, however the world changes; ranks are threads here."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader

from ronde.errors import UsageError
from ronde.torch.elastic import sampler as module
from ronde.torch.elastic.sampler import ElasticSampler


class Ranks:
    """Ranks that are threads, with the operations that samplers use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._mine = threading.local()
        self._size = 1
        self.gathers = 0
        patch.setattr(module, "size", lambda: self._size)
        patch.setattr(module, "rank", lambda: getattr(self._mine, "rank", 0))
        patch.setattr(module, "allreduce", self._allreduce)
        patch.setattr(module, "allgather_object", self._allgather)

    def run(self, size: int, function: Callable[[int], Any]) -> list[Any]:
        self._size, self._given = size, [None] * size
        self._barrier = threading.Barrier(size)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: self._as_rank(rank, function), range(size)))

    def _as_rank(self, rank: int, function: Callable[[int], Any]) -> Any:
        self._mine.rank = rank
        return function(rank)

    def _exchange(self, given: Any) -> list[Any]:
        self._given[self._mine.rank] = given
        self._barrier.wait(10)
        found = list(self._given)
        self._barrier.wait(10)
        return found

    def _allreduce(self, x: Any, op: object, name: str) -> Any:
        return np.max(self._exchange(x), axis=0)

    def _allgather(self, x: Any, name: str) -> list[Any]:
        self.gathers += 1
        return self._exchange(x)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_horovods_scenario(ranks: Ranks) -> None:
    """An epoch, a repeated pass without a new epoch, a restored and a continued part of one."""
    batch, each = 2, 8
    sampler = ElasticSampler(range(each))
    loader: Any = DataLoader(list(range(each)), batch_size=batch, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, _ in enumerate(loader):
            sampler.record_batch(number, batch)
            assert sampler.processed_num == batch * (number + 1) == len(sampler.processed_indices)
        assert number == each // batch - 1
    assert len(list(loader)) == each // batch  # of the same epoch
    sampler.set_epoch(2)
    assert sampler.processed_num == 0
    sampler.record_batch(0, batch)
    sampler.record_batch(1, batch)
    committed = sampler.state_dict()
    sampler.record_batch(2, batch)
    assert sampler.processed_num == 3 * batch
    sampler.load_state_dict(committed)
    assert sampler.processed_num == 2 * batch
    assert len(sampler) == each - 2 * batch
    sampler.set_epoch(3)
    assert len(sampler) == each


def test_set_epoch_at_the_beginning_keeps_an_interrupted_epoch(ranks: Ranks) -> None:
    sampler = ElasticSampler(range(10))
    sampler.record_batch(0, 4)
    sampler.reset()  # a change of the world
    sampler.set_epoch(0)
    assert len(sampler) == 6
    sampler.record_batch(0, 6)
    sampler.set_epoch(0)  # nothing is left: the same epoch again
    assert len(sampler) == 10


def test_states_of_horovods_samplers(ranks: Ranks) -> None:
    sampler = ElasticSampler(range(6), shuffle=False)
    sampler.load_state_dict({"epoch": 1, "processed_indices": {0, 1, 4}})
    assert sampler.remaining_indices == [2, 3, 5]
    sampler.load_state_dict({"epoch": 1, "processed_num": 4})
    assert sampler.remaining_indices == [4, 5]
    with pytest.raises(UsageError):
        sampler.record_batch(-1, 2)


@pytest.mark.parametrize(("count", "size"), [(12, 3), (13, 3), (2, 3), (0, 2)])
def test_every_sample_is_dealt(ranks: Ranks, count: int, size: int) -> None:
    for pad in (True, False):
        dealt = ranks.run(size, lambda _, pad=pad: ElasticSampler(range(count), pad=pad).indices)  # type: ignore[misc]
        times = Counter(index for indices in dealt for index in indices)
        assert set(times) == set(range(count))
        if not pad:
            assert sum(times.values()) == count
        elif count:
            assert {len(indices) for indices in dealt} == {-(-count // size)}


def test_equal_records_need_no_messages_about_samples(ranks: Ranks) -> None:
    def program(rank: int) -> Any:
        sampler = ElasticSampler(range(20))
        sampler.record_batch(0, 2)
        sampler.exchange()
        assert sampler.processed_num == len(sampler.processed_indices) == 6
        assert sampler.state_dict()["processed_indices"] == []
        return sampler.processed_indices

    of_ranks = ranks.run(3, program)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert ranks.gathers == 0


def test_unequal_records_become_known_to_all(ranks: Ranks) -> None:
    def program(rank: int) -> Any:
        sampler = ElasticSampler(range(20))
        if rank == 1:
            sampler.record_batch(0, 3)
        else:
            sampler.record_indices(sampler.get_indices(1, 2))
        sampler.exchange()
        return sampler.processed_indices

    of_ranks = ranks.run(3, program)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert len(of_ranks[0]) == 3 + 2 * 2


class Round(NamedTuple):
    """One round of an epoch. `is_lost`: whether it ends by a loss, after a step of no commit."""

    size: int
    commits: int
    is_lost: bool


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pad", [True, False])
def test_changes_lose_and_repeat_no_sample(ranks: Ranks, seed: int, pad: bool) -> None:
    """Random losses and growth. What counts is what was processed between a commit and the next one."""
    chance = random.Random(seed)
    count, batch = chance.randrange(1, 90), chance.randrange(1, 5)
    order: list[int] = []
    state: dict[str, Any] = {"epoch": seed, "processed_num": 0}
    while len(set(order)) < count:
        planned = Round(chance.randrange(1, 5), chance.randrange(4), chance.random() < 0.5)
        state, steps = _run_round(ranks, planned, state, count, batch, pad)
        order += steps
    assert set(order) == set(range(count))
    assert len(order) - count <= (3 if pad else 0)  # the padding of the last round
    ranks.run(1, lambda _: None)
    alone = ElasticSampler(range(count), seed=7)
    alone.set_epoch(seed)
    assert list(dict.fromkeys(order)) == alone.indices  # whatever the sizes of the world


def _run_round(
    ranks: Ranks, planned: Round, state: dict[str, Any], count: int, batch: int, pad: bool
) -> tuple[dict[str, Any], list[int]]:
    """Return the state of the last commit, and the samples of all committed steps, in order."""
    size, commits, is_lost = planned

    def program(_: int) -> Any:
        sampler = ElasticSampler(range(count), seed=7, pad=pad)
        sampler.load_state_dict(state)
        done, saved = [], sampler.state_dict()
        for number in range(min(commits, -(-sampler.total_size // (size * batch)) + 1)):
            done.append(sampler.get_indices(number, batch))
            sampler.record_batch(number, batch)
            sampler.exchange()
            saved = sampler.state_dict()
        if is_lost:
            sampler.record_batch(commits, batch)
        return saved, done

    of_ranks = ranks.run(size, program)
    assert all(saved == of_ranks[0][0] for saved, _ in of_ranks)
    steps = zip(*(done for _, done in of_ranks))
    return of_ranks[0][0], [
        index
        for parts in steps
        for position in range(batch)
        for part in parts
        for index in part[position : position + 1]
    ]


def test_a_loop_that_goes_on_after_a_restore_records_the_next_batches(ranks: Ranks) -> None:
    sampler = ElasticSampler(range(8))
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    sampler.load_state_dict(sampler.state_dict())
    sampler.record_batch(2, 2)
    assert sampler.processed_num == 6
    assert set(sampler.indices[:2]) <= sampler.processed_indices
    sampler.record_batch(3, 2)
    sampler.record_batch(4, 2)
    assert sampler.processed_indices == set(range(8))
