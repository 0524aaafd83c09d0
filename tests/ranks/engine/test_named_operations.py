"""The engine on real ranks: any order, any thread, every operation, changing shapes, disagreements, departures."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.engine import submit
from ronde.errors import MismatchError, PeerLostError, UsageError
from ronde.testing import ranks
from ronde.testing.worker import tell
from ronde.types import Kind

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
SIZES = pytest.mark.parametrize("n", [1, 2, 3, 4])


def environ(transport: str, **more: object) -> dict[str, str]:
    return {"RONDE_TRANSPORT": transport} | {name: str(value) for name, value in more.items()}


# Any order, any thread


def submit_in_random_orders(tensors: int, rounds: int, seed: int, changes: bool) -> int:
    """Three threads submit a third of the tensors each, every rank in its own order. Returns how many were right."""
    ronde.init()
    own = random.Random(seed + 1000 * ronde.rank())
    common = random.Random(seed)
    right = 0
    total = sum(range(1, ronde.size() + 1))
    for _ in range(rounds):
        lengths = [common.choice((1, 3, 17, 300)) if changes else 1 + index % 29 for index in range(tensors)]
        order = list(range(tensors))
        own.shuffle(order)
        results: dict[int, Any] = {}

        def work(part: list[int], lengths: list[int] = lengths, results: dict[int, Any] = results) -> None:
            handles = {}
            for index in part:
                x = np.full(lengths[index], index + ronde.rank() + 1, np.float64)
                handles[index] = ronde.allreduce_async(x, name=f"t{index}", op=ronde.Sum)
            for index, handle in handles.items():
                results[index] = handle.wait()

        threads = [threading.Thread(target=work, args=(order[part::3],)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, length in enumerate(lengths):
            expected = np.full(length, index * ronde.size() + total, np.float64)
            np.testing.assert_array_equal(results[index], expected)
            right += 1
    ronde.shutdown()
    return right


@pytest.mark.parametrize("capacity", [0, 1, 50, 1024])
@pytest.mark.parametrize("n", [2, 3])
def test_tensors_in_random_orders_by_three_threads(n: int, capacity: int) -> None:
    done = ranks.run(
        submit_in_random_orders, n, 60, 10, 7, False, environ=environ("auto", RONDE_CACHE_CAPACITY=capacity)
    )
    assert done == [600] * n


@ON_BOTH
def test_shapes_that_change_at_random(transport: str) -> None:
    assert ranks.run(submit_in_random_orders, 3, 30, 10, 11, True, environ=environ(transport)) == [300] * 3


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, 1, 50, 1024])
def test_a_thousand_rounds_of_200_tensors(capacity: int) -> None:
    rounds = 1000 if capacity == 1024 else 300
    done = ranks.run(
        submit_in_random_orders,
        2,
        200,
        rounds,
        13,
        False,
        environ=environ("auto", RONDE_CACHE_CAPACITY=capacity),
        timeout_s=280,
    )
    assert done == [200 * rounds] * 2


# Every operation


def do_every_operation() -> str:
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    total = sum(range(size))
    for _ in range(3):  # the first time negotiated, then cached
        for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8, np.float16):
            x = np.full((3, 2), rank, dtype)
            tag = np.dtype(dtype).name
            assert (ronde.allreduce(x, name=f"sum {tag}", op=ronde.Sum) == total).all()
            average = ronde.allreduce(x, name=f"average {tag}")
            expected = total // size if np.issubdtype(dtype, np.integer) else np.float64(total) / size
            np.testing.assert_allclose(average, np.full((3, 2), expected), rtol=1e-3)
            assert (ronde.allreduce(x, name=f"max {tag}", op=ronde.Max) == size - 1).all()
        y = np.full(5, float(rank + 1))
        scaled = ronde.allreduce(y, name="scaled", op=ronde.Sum, prescale_factor=2.0, postscale_factor=0.25)
        np.testing.assert_allclose(scaled, (total + size) * 0.5)
        assert (y == rank + 1).all()
        assert ronde.allreduce(y, name="in place", op=ronde.Sum, out=y) is y
        assert (y == total + size).all()
        ragged: Any = ronde.allgather(np.full((rank + 1, 2), rank), name="ragged")
        assert ragged[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert ronde.allgather(np.array(rank), name="0-d").tolist() == list(range(size))
        for root in range(size):
            assert (ronde.broadcast(np.full(4, rank), root, name=f"from {root}") == root).all()
        dealt = ronde.alltoall(np.arange(size * 2) + 100 * rank, name="even")
        assert dealt.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
        splits = [p + rank for p in range(size)]
        handle = ronde.alltoall_async(np.full(sum(splits), rank), splits, name="uneven")
        assert handle.wait().tolist() == [r for r in range(size) for _ in range(rank + r)]
        assert handle.received_splits == [rank + r for r in range(size)]
        rows = size + 1
        share = ronde.reducescatter(np.arange(rows * 2.0).reshape(rows, 2), name="shares", op=ronde.Sum)
        mine = np.array_split(np.arange(rows * 2.0).reshape(rows, 2), size)[rank] * size
        np.testing.assert_array_equal(share, mine)
        ronde.barrier()
        assert ronde.allreduce(np.ones(0), name="nothing").shape == (0,)
        scattered = np.ones((4, 4))[::2, ::2]  # not contiguous
        assert (ronde.allreduce(scattered, op=ronde.Sum) == size).all()
    ronde.shutdown()
    return "done"


@ON_BOTH
@SIZES
def test_every_operation(n: int, transport: str) -> None:
    assert ranks.run(do_every_operation, n, environ=environ(transport)) == ["done"] * n


def fuse_many(count: int) -> float:
    ronde.init()
    for step in range(5):
        handles = [
            ronde.allreduce_async(
                np.full(100 + index, index + step, np.float32), name=f"{index}", op=ronde.Sum
            )
            for index in range(count)
        ]
        for index, handle in enumerate(handles):
            assert (handle.wait() == (index + step) * ronde.size()).all()
    ronde.shutdown()
    return 1.0


@pytest.mark.parametrize("fusion", ["0", "4KiB", "32MiB"])
def test_fusion_changes_no_result(fusion: str) -> None:
    ranks.run(fuse_many, 2, 200, environ=environ("auto", RONDE_FUSION_BYTES=fusion))


# What goes wrong


def disagree() -> dict[str, str]:
    """Every way to disagree; the next operation works. Returns what each was answered with."""
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    last = rank == size - 1
    x = np.ones((2, 3), np.float32)
    cases: dict[str, Any] = {
        "shape": lambda: ronde.allreduce(np.ones((2, 4) if last else (2, 3)), name="shape"),
        "dtype": lambda: ronde.allreduce(x.astype(np.float64) if last else x, name="dtype"),
        "operation": lambda: (
            ronde.allgather(x, name="operation") if last else ronde.allreduce(x, name="operation")
        ),
        "reduction": lambda: ronde.allreduce(x, name="reduction", op=ronde.Max if last else ronde.Sum),
        "root": lambda: ronde.broadcast(x, size - 1 if last else 0, name="root"),
        "prescale": lambda: ronde.allreduce(x, name="prescale", prescale_factor=0.5 if last else 1.0),
        "device": lambda: submit(
            Kind.allreduce, x, name="device", op=ronde.Sum, device="cuda" if last else "cpu"
        ).wait(),
        "rows": lambda: ronde.allgather(np.ones((2, 4) if last else (2, 3)), name="rows"),
    }
    answers = {}
    for case, call in cases.items():
        for again in range(2):
            with pytest.raises(MismatchError) as caught:
                call()
            assert isinstance(caught.value, RuntimeError)
            answers[f"{case} {again}"] = str(caught.value)
            assert (ronde.allreduce(x, name="after", op=ronde.Sum) == size).all()
    # A cached tensor whose shape changes on one rank only.
    for _ in range(2):
        ronde.allreduce(x, name="cached")
        with pytest.raises(MismatchError):
            ronde.allreduce(x[:1] if last else x, name="cached")
    assert (ronde.allreduce(x, name="cached", op=ronde.Sum) == size).all()
    ronde.shutdown()
    return answers


@pytest.mark.parametrize("n", [2, 3, 4])
def test_disagreements_are_told_to_all(n: int) -> None:
    first, *others = ranks.run(disagree, n)
    assert all(other == first for other in others)
    for case, answer in first.items():
        assert f"tensor '{case.split()[0]}'" in answer, answer
        assert "rank 0 " in answer, answer
        assert f"rank {n - 1} " in answer, answer
    for case, values in {
        "shape 0": ("(2, 3)", "(2, 4)"),
        "dtype 0": ("float32", "float64"),
        "device 1": ("cpu", "cuda"),
    }.items():
        assert all(value in first[case] for value in values)


def misuse() -> str:
    ronde.init()
    size = ronde.size()
    with pytest.raises(UsageError):
        ronde.allreduce("text", name="x")
    with pytest.raises(UsageError):
        ronde.broadcast(np.ones(3), size, name="x")
    with pytest.raises(UsageError):
        ronde.allreduce(np.ones(3, bool), name="x")  # there is no average of bool values
    with pytest.raises(UsageError):
        ronde.alltoall(np.ones(2 * size + 1), [1] * size, name="x")
    if ronde.rank() == 0:
        handle = ronde.allreduce_async(np.ones(3), name="twice")
        with pytest.raises(ValueError, match="'twice'"):
            ronde.allreduce_async(np.ones(3), name="twice")
        time.sleep(0.2)
    else:
        time.sleep(0.2)
        handle = ronde.allreduce_async(np.ones(3), name="twice")
    assert (handle.wait() == 1).all()
    ronde.shutdown()
    with pytest.raises(ronde.NotInitializedError):
        ronde.allreduce(np.ones(3))
    return "done"


def test_misuse_is_refused_on_the_spot() -> None:
    assert ranks.run(misuse, 2) == ["done"] * 2


def wait_for_a_lost_rank(leaves: bool) -> str:
    ronde.init()
    ronde.allreduce(np.ones(3), name="warm")
    if ronde.rank() == 1:
        ronde.world().barrier()  # the others have submitted
        tell()
        if leaves:
            ronde.shutdown()
            return "left"
        time.sleep(100)
    hit = ronde.allreduce_async(np.ones(3), name="warm")
    miss = ronde.allreduce_async(np.ones(3), name="new")
    ronde.world().barrier()
    for handle in (hit, miss):
        with pytest.raises(PeerLostError, match="rank 1 on ") as caught:
            handle.wait()
        assert caught.value.rank == 1
    with pytest.raises(PeerLostError):
        ronde.allreduce(np.ones(3), name="later")
    ronde.shutdown()
    return "told"


@ON_BOTH
@pytest.mark.parametrize("n", [2, 3])
def test_a_lost_rank_fails_what_is_pending_and_what_comes(n: int, transport: str) -> None:
    with ranks.start(wait_for_a_lost_rank, n, False, environ=environ(transport)) as job:
        job.told(1)
        time.sleep(0.3)
        os.kill(job.pids[1], signal.SIGKILL)
        outcomes = job.outcomes()
    assert [outcomes[rank].value for rank in range(n) if rank != 1] == ["told"] * (n - 1)


@ON_BOTH
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_leaves_fails_what_needs_it(n: int, transport: str) -> None:
    results = ranks.run(wait_for_a_lost_rank, n, True, environ=environ(transport))
    assert results == ["left" if rank == 1 else "told" for rank in range(n)]


def init_again(cycles: int) -> int:
    for cycle in range(cycles):
        ronde.init()
        assert (ronde.allreduce(np.full(3, cycle), op=ronde.Sum) == cycle * ronde.size()).all()
        ronde.shutdown()
    return cycles


def test_init_and_shutdown_again_and_again() -> None:
    assert ranks.run(init_again, 2, 20) == [20, 20]


# The hot path needs no interpreter


def submit_and_spin(tensors: int) -> float:
    """Rank 1 submits everything and then holds the interpreter; rank 0 gets everything all the same."""
    ronde.init()
    names = [f"t{index}" for index in range(tensors)]
    x = np.ones(16, np.float32)
    for _ in range(2):
        for name in names:
            ronde.allreduce(x, name=name)
    ronde.world().barrier()
    slowest = 0.0
    if ronde.rank() == 1:
        sys.setswitchinterval(1000.0)
        handles = [ronde.allreduce_async(x, name=name) for name in names]
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        assert all(handle.done() for handle in handles)
        sys.setswitchinterval(0.005)
    else:
        time.sleep(0.3)
        for name in names:
            started = time.monotonic()
            ronde.allreduce(x, name=name)
            slowest = max(slowest, time.monotonic() - started)
    ronde.shutdown()
    return slowest


def test_cached_tensors_run_while_a_rank_holds_the_interpreter() -> None:
    slowest, _ = ranks.run(submit_and_spin, 2, 100)
    assert slowest < 1.0  # generous: the other rank lets go of its interpreter only after 1.5 s


# Endings and other accidents


def leave_after_submitting() -> float:
    ronde.init(linger_ns=10**9)
    ronde.allreduce(np.ones(3), name="hit")
    handle = ronde.allreduce_async(np.ones(3), name="hit", op=ronde.Average)
    ronde.world().barrier()
    if ronde.rank() == 1:
        ronde.shutdown()
    mean = float(handle.wait()[0])
    ronde.shutdown()
    return mean


def test_what_all_have_submitted_still_runs_when_a_rank_leaves() -> None:
    assert ranks.run(leave_after_submitting, 2) == [1.0, 1.0]


def pass_odd_values() -> str:
    ronde.init()
    x = np.ones(4, np.float32)
    half: Any = np.float32(0.5)
    root: Any = np.int64(0)
    for _ in range(2):
        scaled = ronde.allreduce(x, name="scaled", prescale_factor=half, postscale_factor=True)
        assert (scaled == 0.5).all()
        assert (ronde.broadcast(x, root, name="from 0") == 1).all()
    for name in (5, "\udcff"):
        with pytest.raises(UsageError, match="name"):
            ronde.allgather(x, name=name)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="scale factors"):
        ronde.allreduce(x, name="scaled", prescale_factor="much")  # type: ignore[call-overload]
    ronde.shutdown()
    return "done"


def pass_masked_arrays() -> str:
    """The engine refuses a masked array under a new name, and where it repeats the last call of a name."""
    ronde.init()
    x = np.ones(4, np.float32)
    masked = np.ma.masked_array(x, [True, False, False, False])
    calls: list[Callable[[Any], Any]] = [
        lambda each: ronde.allreduce(each, "a"),
        lambda each: ronde.allreduce(x, "b", out=each),
        lambda each: ronde.grouped_allreduce([x, each], "c"),
        lambda each: ronde.allgather(each, "d"),
        lambda each: ronde.broadcast(each, name="e"),
        lambda each: ronde.alltoall(each, name="f"),
        lambda each: ronde.reducescatter(each, "g"),
    ]
    for _ in range(3):
        for call in calls:
            if ronde.rank() == 0:
                with pytest.raises(UsageError, match="is a masked array"):
                    call(masked)
            call(x.copy())
    ronde.shutdown()
    return "done"


def test_masked_arrays_are_refused() -> None:
    assert ranks.run(pass_masked_arrays, 2) == ["done"] * 2


def test_numbers_of_any_type_and_names_that_are_none() -> None:
    assert ranks.run(pass_odd_values, 2) == ["done"] * 2


def init_with_own_capacity() -> str:
    with pytest.raises(MismatchError, match=r"cache_capacity .* 10 on rank 0 and 11 on rank 1"):
        ronde.init(cache_capacity=10 + int(os.environ["RANK"]))
    return "refused"


def test_settings_of_the_engine_must_agree() -> None:
    assert ranks.run(init_with_own_capacity, 2) == ["refused"] * 2


def shut_down_in_a_handler() -> str:
    ronde.init()
    x = np.ones(2_000_000)
    ronde.allreduce(x, name="x")
    if ronde.rank() == 1:
        ronde.world().barrier()
        time.sleep(1.5)
        with pytest.raises(ronde.PeerError):
            ronde.allreduce(x, name="x")
        ronde.shutdown()
        return "told"
    signal.signal(signal.SIGALRM, lambda *_: ronde.shutdown())
    ronde.world().barrier()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(ronde.RondeError):
        ronde.allreduce(x, name="x")
    return "shut down"


def test_a_signal_handler_may_shut_down() -> None:
    assert ranks.run(shut_down_in_a_handler, 2) == ["shut down", "told"]


def wait_in_a_forked_child() -> int:
    ronde.init()
    ronde.allreduce(np.ones(3), name="x")
    handle = ronde.allreduce_async(np.ones(3), name="x") if ronde.rank() == 0 else None
    code = 0
    if handle is not None:
        child = os.fork()
        if child == 0:
            try:
                handle.wait()
            except UsageError:
                os._exit(7)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ronde.world().barrier()
    handle = handle or ronde.allreduce_async(np.ones(3), name="x")
    assert (handle.wait() == 1).all()
    ronde.shutdown()
    return code


def test_a_forked_child_is_refused() -> None:
    assert ranks.run(wait_in_a_forked_child, 2) == [7, 0]


def forget_handles(times: int) -> list[int]:
    counts = []
    for _ in range(times):
        ronde.init()
        for _ in range(3):
            ronde.allreduce(np.ones(3), name="x")
        ronde.allreduce_async(np.ones(3), name="x")  # nobody waits
        ronde.world().barrier()
        ronde.shutdown()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_handles_that_nobody_waits_for_keep_nothing_alive() -> None:
    for counts in ranks.run(forget_handles, 2, 5):
        assert counts[-1] == counts[1]


ENDS_WHILE_THREADS_SUBMIT = """
import threading, time
import numpy as np
import ronde

def submit_for_ever(name):
    while True:
        try:
            ronde.allreduce(np.ones(10), name=name)
        except ronde.RondeError:
            pass

ronde.init()
for i in range(8):
    threading.Thread(target=submit_for_ever, args=(str(i),), daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_program_may_end_while_daemon_threads_submit(times: int) -> None:
    for _ in range(times):
        ended = subprocess.run([sys.executable, "-c", ENDS_WHILE_THREADS_SUBMIT], check=False, timeout=60)
        assert ended.returncode == 0
