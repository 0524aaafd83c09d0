"""Ranks that run out of data: the others go on, and all meet again."""

from __future__ import annotations

import os
import signal
import time

import ml_dtypes
import numpy as np
import pytest

import ronde
from ronde.errors import MismatchError, PeerLostError
from ronde.testing import ranks
from ronde.testing.worker import tell

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])


def uneven_steps(epochs: int, divisor: str) -> list[int]:
    """Rank r has 3 + 5 r steps in the first epoch, and the other way round in the second."""
    ronde.init(join_average=divisor)
    rank, size = ronde.rank(), ronde.size()
    lasts = []
    for epoch in range(epochs):
        steps = [3 + 5 * (each if epoch % 2 == 0 else size - 1 - each) for each in range(size)]
        for step in range(steps[rank]):
            there = [each for each in range(size) if step < steps[each]]
            x = np.full(1000, rank + 1, np.float32)
            total = sum(each + 1 for each in there)
            handles = [ronde.allreduce_async(x, name=f"t{index}", op=ronde.Sum) for index in range(20)]
            average = ronde.allreduce(x, name="average")
            assert np.allclose(average, total / (size if divisor == "all" else len(there)))
            whole = ronde.allreduce(np.full(3, 10 * (rank + 1)), name="whole")
            assert whole[0] == total * 10 // (size if divisor == "all" else len(there))
            assert ronde.allreduce(-x, name="min", op=ronde.Min)[0] == -max(there) - 1
            assert ronde.allreduce(x, name="max", op=ronde.Max)[-1] == max(there) + 1
            assert ronde.allreduce(x, name="product", op=ronde.Product)[0] == np.prod(
                [each + 1 for each in there]
            )
            assert ronde.allreduce(x.astype(ml_dtypes.bfloat16), op=ronde.Min)[0] == min(there) + 1
            assert ronde.allgather(np.full(rank + 1, rank), name="rows").tolist() == [
                each for each in there for _ in range(each + 1)
            ]
            scattered = ronde.reducescatter(
                np.full((2 * size, 2), rank + 1.0), name="scattered", op=ronde.Sum
            )
            assert scattered.tolist() == [[total] * 2] * 2
            root = there[-1]
            assert ronde.broadcast(x, root=root, name=f"from {root}")[0] == root + 1
            small, large = ronde.grouped_allreduce([x, np.full(70_000, rank)], name="group", op=ronde.Sum)
            assert small[0] == total
            assert large[0] == sum(there)
            for handle in handles:
                assert handle.wait()[0] == total
        lasts.append(ronde.join())
        assert ronde.allreduce(np.ones(2), op=ronde.Sum).tolist() == [size, size]
    ronde.shutdown()
    return lasts


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@ON_BOTH
def test_uneven_numbers_of_steps(n: int, transport: str) -> None:
    answers = ranks.run(uneven_steps, n, 3, "all", environ={"RONDE_TRANSPORT": transport})
    assert answers == [[n - 1, 0, n - 1]] * n


def test_an_average_of_those_that_contribute() -> None:
    ranks.run(uneven_steps, 3, 2, "contributing")


@pytest.mark.parametrize("capacity", ["0", "3"])
def test_with_a_cache_that_is_too_small(capacity: str) -> None:
    ranks.run(uneven_steps, 2, 2, "all", environ={"RONDE_CACHE_CAPACITY": capacity})


def join_with_special_numbers() -> None:
    """Joined ranks change no bit of what the others reduce: rank 0 gets the bits of its array back."""
    ronde.init(join_average="contributing")
    if ronde.rank() == 0:
        numbers = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf])
        for real in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
            x = np.resize(numbers.astype(real), 5000)
            for op in (ronde.Sum, ronde.Average, ronde.Product, ronde.Min, ronde.Max):
                assert ronde.allreduce(x, op=op).tobytes() == x.tobytes(), (real, op)
                few = ronde.grouped_allreduce([x[:6], x[1:], x[:7]], op=op)[2]  # fused
                assert few.tobytes() == x[:7].tobytes(), (real, op)
        pairs = np.stack(np.meshgrid(numbers, numbers), axis=-1).reshape(-1)
        for parts in (pairs, pairs.astype(np.float32)):
            complexes = parts.view(np.complex128 if parts.itemsize == 8 else np.complex64)
            for op in (ronde.Sum, ronde.Average, ronde.Product):
                for x in (complexes, np.resize(complexes, 3001)):
                    assert ronde.allreduce(x, op=op).tobytes() == x.tobytes(), (x.dtype, op)
    ronde.join()
    assert ronde.allreduce(np.array([1j, np.inf]), op=ronde.Product)[0] == 1j ** ronde.size()
    ronde.shutdown()


@pytest.mark.parametrize("hosts", ["aaa", "aabb", pytest.param("abc", marks=pytest.mark.slow)])
def test_joined_ranks_change_no_bit(hosts: str) -> None:
    places = [ranks.Place(environ={"RONDE_HOST_ID": host}) for host in hosts]
    with ranks.start(join_with_special_numbers, len(hosts), places=places) as job:
        job.results()


def join_with_pending() -> float:
    """Both have something in flight that the other never submits; the second time it is cached."""
    ronde.init()
    rank = ronde.rank()
    result = 0.0
    for _ in range(3):
        handle = ronde.allreduce_async(np.full(4, rank + 1.0), name=f"of {rank}", op=ronde.Sum)
        ronde.join()
        result = handle.wait()[0]
        for other in range(ronde.size()):
            ronde.allreduce(np.ones(4), name=f"of {other}", op=ronde.Sum)
    ronde.shutdown()
    return result


def test_what_is_in_flight_when_all_join_is_done() -> None:
    assert ranks.run(join_with_pending, 3) == [1, 2, 3]


def join_what_cannot_be_joined() -> list[str]:
    ronde.init()
    rank = ronde.rank()
    x = np.ones(4)
    ronde.broadcast(x, root=1, name="broadcast")
    ronde.alltoall(np.ones(ronde.size() * 2), name="parts")
    messages = []
    if rank != 1:
        for handle in (
            ronde.broadcast_async(x, root=1, name="broadcast"),
            ronde.alltoall_async(np.ones(ronde.size() * 2), name="parts"),
        ):
            with pytest.raises(MismatchError) as caught:
                handle.wait()
            messages.append(str(caught.value))
            assert ronde.allreduce(x, name="next", op=ronde.Sum)[0] == ronde.size() - 1
        ronde.barrier()
    else:
        ronde.allreduce_async(x, name="forgotten")
        with pytest.raises(ValueError, match="in flight already"):
            ronde.allreduce(x, name="forgotten")
    ronde.join()
    assert ronde.allreduce(x, name="next", op=ronde.Sum)[0] == ronde.size()
    ronde.shutdown()
    return messages


@pytest.mark.parametrize("n", [2, 3])
def test_operations_that_need_everybody_fail_and_the_next_works(n: int) -> None:
    first, other, *_ = ranks.run(join_what_cannot_be_joined, n)
    assert other == []
    assert first == [
        "tensor 'broadcast': the root of the broadcast, rank 1, has joined: it has nothing to send",
        "tensor 'parts': rank 0 submitted alltoall, but rank 1 has joined, so its number of rows is unknown",
    ]


def join_and_lose_one() -> str:
    ronde.init()
    tell("ready")
    if ronde.rank() == 1:
        time.sleep(600)
    with pytest.raises(PeerLostError) as caught:
        ronde.join()
    return str(caught.value)


def test_a_rank_that_dies_while_others_have_joined() -> None:
    with ranks.start(join_and_lose_one, 3) as job:
        for rank in range(3):  # none of them is in init any more
            job.told(rank)
        os.kill(job.pids[1], signal.SIGKILL)
        outcomes = job.outcomes()
    assert all("rank 1" in outcomes[rank].value for rank in (0, 2))
