"""Process sets: some ranks with operations of their own, which nobody else has to wait for."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

import ronde
from ronde.errors import MismatchError, UsageError
from ronde.testing import ranks

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])


def work_in_two_halves(is_static: bool) -> None:
    even, odd = ronde.ProcessSet([0, 2]), ronde.ProcessSet([3, 1])
    ronde.init(process_sets=[even, odd] if is_static else None)
    if not is_static:
        assert ronde.add_process_set(even) is even
        ronde.add_process_set(odd)
    rank = ronde.rank()
    mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    assert ronde.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3]}
    assert ronde.global_process_set.ranks == [0, 1, 2, 3]
    assert mine.included()
    assert not other.included()
    assert (mine.size(), mine.rank()) == (2, rank // 2)
    total = sum(mine.ranks)
    for _ in range(20 + 20 * (rank % 2)):  # the sets do not wait for each other
        x = np.full(5, rank)
        # In both sets the same name.
        everywhere = ronde.allreduce(x, name="x", op=ronde.Sum, process_set=mine)
        assert everywhere.tolist() == [total] * 5
        assert ronde.allgather(np.array([rank]), process_set=mine).tolist() == mine.ranks
        assert ronde.broadcast(x, root=mine.ranks[1], name="b", process_set=mine)[0] == mine.ranks[1]
        pair = ronde.grouped_allreduce([x, x + 1], op=ronde.Max, process_set=mine)
        assert [each[0] for each in pair] == [mine.ranks[1], mine.ranks[1] + 1]
        assert ronde.alltoall(np.array([rank, rank]), process_set=mine).tolist() == mine.ranks
        assert ronde.reducescatter(np.full(2, rank), op=ronde.Sum, process_set=mine).tolist() == [total]
        ronde.barrier(process_set=mine)
    stranger = re.escape(f"rank {rank} is not in the process set of ranks {other.ranks}")
    with pytest.raises(UsageError, match=stranger):
        ronde.allreduce(np.ones(1), process_set=other)
    with pytest.raises(ValueError, match=f"rank {other.ranks[0]} is not in the process set"):
        ronde.broadcast(np.ones(1), root=other.ranks[0], process_set=mine)
    assert ronde.allreduce(np.full(1, rank), op=ronde.Sum).tolist() == [6]
    assert ronde.allreduce(np.full(1, rank), op=ronde.Sum, process_set=ronde.global_process_set).tolist() == [
        6
    ]
    ronde.shutdown()
    assert not mine.initialized()
    with pytest.raises(UsageError, match="is not added"):
        ronde.allreduce(np.ones(1), process_set=mine)


@ON_BOTH
@pytest.mark.parametrize("is_static", [True, False])
def test_two_halves(is_static: bool, transport: str) -> None:
    ranks.run(work_in_two_halves, 4, is_static, environ={"RONDE_TRANSPORT": transport})


def add_and_remove() -> int:
    ronde.init(process_sets="dynamic")
    rank = ronde.rank()
    alive = threading.active_count()
    for times in range(3):
        pair = ronde.add_process_set([1, 0])
        trio = ronde.add_process_set(ronde.ProcessSet(range(3)[1:]))
        assert (pair.process_set_id, trio.process_set_id) == (2 * times + 1, 2 * times + 2)
        if rank == 1:  # in both, at once
            first = ronde.allreduce_async(np.ones(3), process_set=pair, op=ronde.Sum)
            second = ronde.allreduce_async(np.ones(3), process_set=trio, op=ronde.Sum)
            assert first.wait()[0] == second.wait()[0] == 2
        else:
            assert ronde.allreduce(np.ones(3), process_set=(pair, None, trio)[rank], op=ronde.Sum)[0] == 2
        assert ronde.remove_process_set(trio)
        assert not ronde.remove_process_set(trio)
        assert ronde.remove_process_set(pair)
        assert ronde.get_process_set_ids_and_ranks() == {0: [0, 1, 2]}
    assert threading.active_count() == alive
    assert ronde.allreduce(np.ones(3), op=ronde.Sum)[0] == 3
    ronde.shutdown()
    return rank


def test_sets_come_and_go() -> None:
    assert ranks.run(add_and_remove, 3) == [0, 1, 2]


def misuse() -> list[str]:
    ronde.init()
    rank, messages = ronde.rank(), []
    for wanted, error in (
        ([0, rank], MismatchError),
        ([0, 3], UsageError),
        ([], UsageError),
        ([1, 1], UsageError),
        (range(3), UsageError),
    ):
        with pytest.raises(error) as caught:
            ronde.add_process_set(wanted)
        messages.append(str(caught.value))
    known = ronde.add_process_set([0, 2])
    for again in (known, [2, 0]):
        with pytest.raises(ValueError, match="already"):
            ronde.add_process_set(again)
    with pytest.raises(UsageError, match="all ranks cannot be removed"):
        ronde.remove_process_set(ronde.global_process_set)
    with pytest.raises(UsageError, match="needs a list of ranks, not 'ab'"):
        ronde.add_process_set("ab")  # type: ignore[arg-type]
    if rank != 1:
        x = np.ones(2 if rank == 0 else 3)
        with pytest.raises(MismatchError, match=r"rank 0 .* with shape \(2,\), but rank 2 with shape \(3,\)"):
            ronde.allreduce(x, name="x", process_set=known)
        assert ronde.allreduce(x[:1], name="x", process_set=known).tolist() == [1]
    ronde.shutdown()
    return messages


def test_misuse_is_told_to_all() -> None:
    first, *others = ranks.run(misuse, 3)
    assert all(other == first for other in others)
    assert first[0] == (
        "the process set to add is [0, 0] on rank 0 and [0, 1] on rank 1: it must be the same on all ranks"
    )
    assert first[1] == "a process set needs distinct ranks from 0 to 2, at least one, not [0, 3]"
    assert first[4] == "there is a process set of ranks [0, 1, 2] already, with id 0"
