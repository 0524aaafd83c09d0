"""Calls of `ronde.world()` and of sub-communicators that wait for ever: reported with rank, counts and lines."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.ranks.engine.test_stall import LIMIT_NS, Reports, lines_of, stay_in_user_code

import ronde
from ronde.comm import world as comm
from ronde.errors import AbortedError, PeerError
from ronde.testing import ranks

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
HOST = os.uname().nodename
CIRCLE = "ranks wait in a circle, rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0: a deadlock, unless another"


def reports(pipe: int = -1) -> Reports:
    return Reports(pipe, logger="ronde.comm")


def call_once_more_than(stuck: int, how: str, path: str) -> list[str]:
    """The stuck rank stays in user code until a report has come. No engine takes part."""
    comm.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    told = reports(pipe)
    world = comm.world()
    x = np.ones(3)
    for _ in range(5):
        world.allreduce(x)
    if world.rank == stuck:
        stay_in_user_code(how, pipe)
    world.allreduce(x)  # the sixth
    comm.shutdown()
    os.close(pipe)
    return told.texts


@pytest.mark.parametrize(
    ("how", "stuck", "transport"),
    [
        ("holds the interpreter", 1, "auto"),
        pytest.param("sleeps", 1, "auto", marks=pytest.mark.slow),
        pytest.param("spins", 0, "tcp", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_come_to_a_call_is_named(
    how: str, stuck: int, transport: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = ranks.run(
        *(call_once_more_than, 2, stuck, how, str(tmp_path / "pipe")), environ={"RONDE_TRANSPORT": transport}
    )
    assert told[stuck] == []
    (report,) = told[1 - stuck]
    assert "stalled: 1 call has been waiting for" in report
    assert "call 6 on world: allreduce of 3 float64 by sum" in report
    assert f"begun by rank {1 - stuck}, not by rank {stuck}" in report
    assert f"rank {stuck} on {HOST} has made 5 collective calls" in report
    assert any(line in report for line in lines_of(how)), report
    assert f'this rank waits here: File "{__file__}"' in report
    assert "RONDE_STALL_SHUTDOWN" in report


def wait_for_each_other(how: str) -> tuple[list[str], str]:
    """Each rank waits for what the other does not do; the report comes long before the first limit."""
    comm.init(stall_warning_ns=600 * 10**9, stall_shutdown_ns=3 * 10**9)
    told = reports()
    world = comm.world()
    x, peer = np.ones(3), (world.rank + 1) % world.size
    if how == "recv":
        call = partial(world.recv, x, peer)
    else:
        twins = [world.duplicate(), world.duplicate()]
        call = partial(twins[world.rank].allreduce, x)
    with pytest.raises(PeerError) as caught:  # one of two communicators may end first, with its rank
        call()
    while not told.texts and world.rank == 0:  # it is written by another thread
        time.sleep(0.1)
    comm.shutdown()
    return told.texts, str(caught.value)


@ON_BOTH
def test_two_ranks_in_recv_are_reported_at_once(transport: str) -> None:
    (told, error), (others, _) = ranks.run(
        *(wait_for_each_other, 2, "recv"), environ={"RONDE_TRANSPORT": transport}
    )
    assert others == []
    (report,) = told
    assert "recv from rank 1 on world: float64 with tag 0" in report
    assert "waits in recv from rank 0 on world: float64 with tag 0" in report
    assert "a deadlock, unless another thread" in report
    assert "in wait_for_each_other" in report
    assert "stall_shutdown is 3 s" in error


@ON_BOTH
def test_communicators_in_different_order_are_reported_at_once_with_both(transport: str) -> None:
    (told, _), (others, _) = ranks.run(
        *(wait_for_each_other, 2, "order"), environ={"RONDE_TRANSPORT": transport}
    )
    assert others == []
    (report,) = told
    assert "call 1 on duplicate 1 of world: allreduce of 3 float64 by sum" in report
    assert "in call 1 on duplicate 2 of world: allreduce of 3 float64 by sum" in report
    assert "a deadlock, unless another thread" in report
    assert "in wait_for_each_other" in report


def test_three_ranks_in_a_ring_of_recv_are_reported_at_once() -> None:
    (told, _), *others = ranks.run(wait_for_each_other, 3, "recv")
    assert [texts for texts, _ in others] == [[], []]
    (report,) = told
    assert CIRCLE in report
    for rank, source in ((1, 2), (2, 0)):
        assert (
            f"rank {rank} on {HOST} has made 0 collective calls and waits in recv from rank {source}"
            in report
        )
    assert report.count("in wait_for_each_other") == 3


def wait_in_a_group(path: str) -> list[str]:
    comm.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    told = reports(pipe if comm.world().rank else -1)  # rank 0 waits for both, and reports that
    group = comm.world().group([2, 1])
    if group is not None:
        if group.rank == 0:
            stay_in_user_code("sleeps", pipe)
        group.barrier()
    comm.world().barrier()
    comm.shutdown()
    os.close(pipe)
    return told.texts


def test_ranks_of_a_group_are_called_as_in_the_world(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = ranks.run(wait_in_a_group, 3, str(tmp_path / "pipe"))
    (report,) = [text for text in told[1] if "group" in text]
    assert "call 1 on group 1 of world (ranks 2, 1): barrier" in report
    assert "begun by rank 1, not by rank 2" in report


def take_a_while() -> list[str]:
    """Late, but not stalled: nothing is said, and what was late does not stay on record."""
    comm.init(stall_warning_ns=3 * 10**9)
    told = reports()
    world = comm.world()
    for _ in range(3):
        if world.rank == 1:
            time.sleep(1.3)
        world.barrier()
    comm.shutdown()
    return told.texts


@pytest.mark.slow
def test_who_is_late_is_not_stalled() -> None:
    assert ranks.run(take_a_while, 2) == [[], []]


def cross_names() -> tuple[list[str], str]:
    ronde.init(stall_warning_ns=600 * 10**9, stall_shutdown_ns=3 * 10**9)
    told = Reports()
    x = np.ones(3)
    with pytest.raises(AbortedError, match="stalled") as caught:
        ronde.allreduce(x, name=f"of rank {ronde.rank()}")
    ronde.shutdown()
    return told.texts, str(caught.value)


def test_ranks_that_wait_for_each_others_names_are_reported_at_once() -> None:
    (told, _), (others, _) = ranks.run(cross_names, 2)
    assert others == []
    (report,) = told
    assert "'of rank 0' (allreduce)" in report
    assert f"rank 1 on {HOST} waits for 'of rank 1' (allreduce)" in report
    assert "a deadlock, unless another thread" in report


def cross_three_names() -> list[str]:
    """Each rank waits for a tensor that only the next one has not submitted."""
    ronde.init(stall_warning_ns=600 * 10**9, stall_shutdown_ns=8 * 10**9)
    told = Reports()
    own, later = f"of {ronde.rank()}", f"of {(ronde.rank() + 1) % 3}"
    handle = ronde.allreduce_async(np.ones(3), name=later)
    with pytest.raises(AbortedError, match="stalled"):
        ronde.allreduce(np.ones(3), name=own)
    with pytest.raises(AbortedError, match="stalled"):
        handle.wait()
    ronde.shutdown()
    return told.texts


def test_three_ranks_that_wait_for_each_others_names_are_reported_at_once() -> None:
    (report,), *others = ranks.run(cross_three_names, 3)
    assert others == [[], []]
    assert "'of 0' (allreduce)\n    submitted by ranks 0, 2, not by rank 1" in report
    assert CIRCLE in report
    for rank in (1, 2):
        assert f"rank {rank} on {HOST} waits for 'of {rank}' (allreduce)" in report


def cross_engine_and_world() -> list[str]:
    ronde.init(stall_warning_ns=600 * 10**9, stall_shutdown_ns=8 * 10**9)
    told, of_calls = Reports(), reports()
    call = ronde.world().barrier if ronde.rank() else partial(ronde.allreduce, np.ones(3), name="named")
    with pytest.raises(PeerError):  # one of the two gives up first, and leaves
        call()
    ronde.shutdown()
    return told.texts + of_calls.texts


def test_a_tensor_and_a_call_that_wait_for_each_other_are_reported_at_once() -> None:
    (report,), others = ranks.run(cross_engine_and_world, 2)
    assert others == []
    assert "'named' (allreduce)" in report
    assert f"rank 1 on {HOST} waits in call 1 on world: barrier" in report


def load_slowly(pipe: int) -> None:
    os.read(pipe, 1)  # here it loads


def wait_for_a_child(path: str) -> list[str]:
    comm.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    told = reports(pipe)
    if comm.world().rank == 1:
        loader = multiprocessing.get_context("fork").Process(target=load_slowly, args=(pipe,))
        loader.start()
        loader.join()
    comm.world().barrier()
    comm.shutdown()
    os.close(pipe)
    return told.texts


def test_a_rank_that_waits_for_a_loader_is_reported_with_the_loaders_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (report,), others = ranks.run(wait_for_a_child, 2, str(tmp_path / "pipe"))
    assert others == []
    assert "in wait_for_a_child" in report
    child = report[report.index("child process") :]
    line = inspect.getsourcelines(load_slowly)[1] + 1
    assert f'File "{__file__}", line {line} in load_slowly' in child
