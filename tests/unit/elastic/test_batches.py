"""Which samples a rank gets in each step, whatever happens to the world; and sums that do not depend on its size."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

import ronde
from ronde.comm.communicator import Communicator
from ronde.elastic.batches import Batches, Positions, order_of_epoch, pieces_of, share_of, take
from ronde.elastic.exact_sums import exact_sum
from ronde.elastic.goodput import Ledger
from ronde.types import Max, ReduceOp


def test_an_epoch_has_each_sample_once() -> None:
    first, second = order_of_epoch(1000, 3, 0), order_of_epoch(1000, 3, 1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert (first != second).mean() > 0.9
    assert (first != order_of_epoch(1000, 4, 0)).mean() > 0.9
    assert order_of_epoch(8, 0, 0).tolist() == [2, 4, 6, 5, 1, 7, 0, 3], "the same on every machine"
    assert order_of_epoch(4, None, 7).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_shares_are_all_items_once(size: int) -> None:
    items = list(range(10))
    shares = [items[share_of(10, rank, size)] for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_pieces_are_fixed() -> None:
    assert [piece.tolist() for piece in pieces_of(np.arange(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_samples_of_each_kind_of_data() -> None:
    indices = np.array([2, 0])
    array = np.array([10, 11, 12])
    assert take(3, indices).tolist() == [2, 0]
    assert take(array, indices).tolist() == [12, 10]
    assert [each.tolist() for each in take((array, -array), indices)] == [[12, 10], [-12, -10]]
    assert take({"x": array}, indices)["x"].tolist() == [12, 10]
    assert take(["a", "b", "c"], indices) == ["c", "a"]


def batches(positions: Positions, **options: Any) -> Batches:
    arguments = {"data": 10, "global_batch": 4, "seed": 0, "epochs": 2, "micro_batch": None, "name": ""}
    return Batches(positions, **{**arguments, **options})


@pytest.fixture
def alone() -> Any:
    ronde.init()
    yield
    ronde.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_position_is_where_the_next_step_begins() -> None:
    positions = Positions()
    whole = [batch.tolist() for batch in batches(Positions())]
    assert [len(batch) for batch in whole] == [4, 4, 2, 4, 4, 2]
    seen = []
    for number, batch in enumerate(batches(positions)):
        seen.append(batch.tolist())
        positions.save()
        if number == 3:
            break
    for batch in batches(positions):
        assert batch.tolist() == whole[4]
        break  # a loss: the step was not committed
    positions.restore()
    assert seen + [batch.tolist() for batch in batches(positions)] == whole
    other = Positions()
    other.load(positions.payload())
    assert [batch.tolist() for batch in batches(other)] == whole[4:], "a new process begins at the commit"
    assert not list(batches(positions)), "all epochs are done"
    assert len(list(batches(positions, name="validation", epochs=1))) == 3


@pytest.mark.usefixtures("alone")
def test_pieces_sum() -> None:
    data = np.linspace(0, 1, 10)
    sums = [
        piece.sum(lambda x: np.array([x.sum(), 1.0]), like=np.zeros(2))
        for piece in batches(Positions(), data=data, epochs=1, micro_batch=3)
    ]
    assert np.allclose(np.sum(sums, axis=0), [data.sum(), 5])


@pytest.mark.parametrize(
    "options", [{"global_batch": 0}, {"micro_batch": 5}, {"data": (np.zeros(2), np.zeros(3))}]
)
def test_mistakes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ronde.UsageError):
        batches(Positions(), **options)


class Threads:
    """A world of threads, which can only all-reduce."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._arrays: list[Any] = []

    def allreduce(self, array: Any, op: ReduceOp) -> Any:
        self._barrier.wait()
        self._arrays.append(array)
        self._barrier.wait()
        result = (np.max if op is Max else np.sum)(self._arrays, axis=0)
        if self._barrier.wait() == 0:
            self._arrays = []
        self._barrier.wait()
        return result


def sum_over(size: int, summands: Sequence[Sequence[Any]], like: Sequence[Any]) -> list[Any]:
    """Return the sums that each of so many ranks gets."""
    world = cast(Communicator, Threads(size))
    with ThreadPoolExecutor(size) as pool:
        results = pool.map(
            lambda rank: exact_sum(world, summands[share_of(len(summands), rank, size)], like, len(summands)),
            range(size),
        )
        found = list(results)
    for each in found:
        for mine, first in zip(each, found[0]):
            assert mine.tobytes() == first.tobytes()
    return found[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_sums_have_the_same_bits_for_every_size(dtype: Any) -> None:
    random = np.random.default_rng(1)
    like = [np.zeros((3, 5), dtype), np.zeros(7, dtype), np.zeros(0, dtype)]
    summands = [
        [(random.standard_normal(each.shape) * 10.0 ** random.integers(-3, 3)).astype(dtype) for each in like]
        for _ in range(13)
    ]
    sums = [sum_over(size, summands, like) for size in (1, 2, 3, 5, 16)]
    for other in sums[1:]:
        assert [each.tobytes() for each in other] == [each.tobytes() for each in sums[0]]
    for column, result in enumerate(sums[0]):
        exact = np.sum([np.float64(each[column]) for each in summands], axis=0)
        assert (result.shape, result.dtype) == (like[column].shape, dtype)
        error = np.abs(np.float64(result) - exact).max(initial=0)
        assert error <= 2000 * float(np.finfo(dtype).eps), "as exact as numbers of that size can be"


def test_sums_of_extremes() -> None:
    like = [np.zeros(2, np.float64)]
    for value in (5e-324, 1e308, 0.0):
        assert sum_over(2, [[np.array([value, 0])], [np.array([0, -value])]], like)[0].tolist() == [
            value,
            -value,
        ]
    for value in (np.inf, np.nan):
        assert np.isnan(sum_over(2, [[np.array([value, 0])], [np.array([0, 1.0])]], like)[0]).all()


def test_the_ledger_adds_up() -> None:
    ledger = Ledger(0)
    ledger.begin(100)
    for now_ns in (200, 300):
        ledger.begin_step()
        ledger.commit(now_ns)
    ledger.begin_step()
    assert ledger.lose(350) == (1, 50)
    assert ledger.resume(380, was_lost=True) == 30
    ledger.begin_step()
    ledger.commit(480)
    assert ledger.lose(480) == (0, 0)
    ledger.resume(490, was_lost=False)
    found = ledger.read(500)
    assert (found.commits, found.steps, found.steps_lost, found.recoveries, found.changes) == (3, 3, 1, 1, 1)
    assert (found.counted_ns, found.lost_ns, found.recovering_ns, found.total_ns) == (300, 50, 40, 400)
    assert found.share == 0.75
    assert Ledger(time.monotonic_ns()).read(time.monotonic_ns()).share <= 1


def test_the_time_between_two_trainings_does_not_count() -> None:
    ledger = Ledger(0)
    for begin, end in ((10, 20), (100, 130)):
        ledger.begin(begin)
        ledger.begin_step()
        ledger.end(end)
    found = ledger.read(1000)
    assert (found.commits, found.steps, found.total_ns, found.counted_ns) == (2, 2, 40, 40)
    assert found.share == 1
