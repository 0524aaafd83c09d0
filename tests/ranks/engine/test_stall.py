"""Stalls on real ranks: who is missing is named, with the line where it is, once, whatever that rank is stuck in."""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.errors import AbortedError, PeerError
from ronde.testing import faults, ranks
from ronde.testing.worker import tell

ON_BOTH = pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
LIMIT_NS = 10**9


class Reports(logging.Handler):
    """Collects what is reported; each report also lets a rank go on that waits at the pipe."""

    def __init__(
        self, pipe: int = -1, and_then: Callable[[], object] = lambda: None, logger: str = "ronde.engine"
    ) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._pipe, self._and_then = pipe, and_then
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._and_then()
        if self._pipe >= 0:
            os.write(self._pipe, b".")


def stay_in_user_code(how: str, pipe: int) -> None:
    """Return when something comes through the pipe."""
    if how == "sleeps":
        os.read(pipe, 1)  # here it sleeps
    if how == "spins":
        os.set_blocking(pipe, False)
        while not came(pipe):  # here it spins
            pass
    if how == "holds the interpreter":
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # here it holds the interpreter


def came(pipe: int) -> bool:
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False


def lines_of(how: str) -> list[str]:
    """What a report says of the line where `stay_in_user_code` is; a loop may be at any of its lines."""
    source, first = inspect.getsourcelines(stay_in_user_code)
    marked = next(first + index for index, line in enumerate(source) if f"here it {how}" in line)
    numbers = (marked, marked + 1) if how == "spins" else (marked,)
    return [f'File "{__file__}", line {number} in stay_in_user_code' for number in numbers]


def wait_for_a_stuck_rank(how: str, stuck: int, name: str, path: str) -> list[str]:
    """The stuck rank stays in user code until a report has come. Returns what this rank has reported."""
    ronde.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    reports = Reports(pipe)
    x = np.ones(3)
    for _ in range(2):
        ronde.allreduce(x, name="cached")
    ronde.world().barrier()
    if ronde.rank() == stuck:
        early = ronde.allreduce_async(x, name="early") if name == "early" else None
        stay_in_user_code(how, pipe)
        if early is not None:
            early.wait()
    elif name == "early":
        time.sleep(0.5)  # else all may have requested it while the stuck rank was still in time for the round
    if name == "barrier":
        ronde.barrier()
    elif name != "early" or ronde.rank() != stuck:
        ronde.allreduce(x, name=name)
    ronde.barrier()
    ronde.shutdown()
    os.close(pipe)
    return reports.texts


@pytest.mark.parametrize(
    ("how", "stuck", "name", "n", "transport"),
    [
        ("sleeps", 1, "cached", 3, "auto"),
        ("sleeps", 0, "new", 3, "tcp"),
        ("sleeps", 1, "barrier", 2, "auto"),
        ("spins", 0, "new", 2, "auto"),
        ("spins", 1, "cached", 2, "tcp"),
        ("holds the interpreter", 0, "cached", 3, "tcp"),
        ("holds the interpreter", 1, "new", 3, "auto"),
        ("holds the interpreter", 0, "early", 3, "auto"),
    ],
)
def test_a_report_names_tensor_rank_and_line(
    how: str, stuck: int, name: str, n: int, transport: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = ranks.run(
        *(wait_for_a_stuck_rank, n, how, stuck, name, str(tmp_path / "pipe")),
        environ={"RONDE_TRANSPORT": transport},
    )
    # On a busy machine there may be another report in the end, of the barrier.
    label = "'barrier.noname.0'" if name == "barrier" else f"'{name}'"
    about = [[text for text in texts if label in text] for texts in told]
    assert about[stuck] == []
    (report,) = [text for texts in about for text in texts]
    waiting = [rank for rank in range(n) if rank != stuck]
    assert f"rank {stuck} on " in report
    assert any(line in report for line in lines_of(how)), report
    assert "main thread:" in report
    assert "ronde-engine" not in report
    if name == "early":  # it has submitted it, but does not come to the round
        assert f"rank {stuck} on {os.uname().nodename} holds up the engine" in report
    else:
        who = "rank 1" if n == 2 and stuck == 0 else "rank 0" if n == 2 else f"ranks {waiting[0]}"
        assert f"submitted by {who}" in report
        assert f"not by rank {stuck}" in report


def join_without_the_others(stuck: int, path: str) -> list[str]:
    """All train; then all but one join, and that one stays in user code until a report has come."""
    ronde.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    reports = Reports(pipe)
    for step in range(3 + (ronde.rank() == stuck)):  # the last one without the others, which have joined
        ronde.allreduce(np.ones(3), name="cached" if step else "new")
    if ronde.rank() == stuck:
        stay_in_user_code("sleeps", pipe)
    ronde.join()
    ronde.shutdown()
    os.close(pipe)
    return reports.texts


@pytest.mark.parametrize(("stuck", "n"), [(1, 2), (0, 3)])
def test_a_join_that_one_rank_does_not_reach_is_reported(stuck: int, n: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = ranks.run(join_without_the_others, n, stuck, str(tmp_path / "pipe"))
    (report,) = [text for texts in told for text in texts]
    joined = "rank 0" if n == 2 else "ranks 1-2"
    assert "and join() waits for the other ranks to join" in report
    assert f"called by {joined}, not by rank {stuck}" in report
    assert "in join_without_the_others" in report  # where this rank waits
    assert any(line in report for line in lines_of("sleeps")), report


def join_in_front_of_a_barrier() -> list[str]:
    """Rank 0 joins the engine, rank 1 is in a call of the world: each waits for the other."""
    ronde.init(stall_warning_ns=600 * 10**9, stall_shutdown_ns=3 * 10**9)
    reports = Reports()
    with pytest.raises(PeerError):
        (ronde.world().barrier if ronde.rank() else ronde.join)()
    ronde.shutdown()
    return reports.texts


def test_a_join_and_a_call_that_wait_for_each_other_are_reported_at_once() -> None:
    (report,), others = ranks.run(join_in_front_of_a_barrier, 2)
    assert others == []
    assert "rank 1 waits for this rank, too: a deadlock" in report
    assert "waits in call 1 on world: barrier" in report


def join_long_before_the_others() -> list[str]:
    """The others need several times the limit until they have joined, and go on all the while."""
    ronde.init(stall_warning_ns=LIMIT_NS)
    reports = Reports()
    if ronde.rank():
        for step in range(12):
            time.sleep(LIMIT_NS / 4e9)
            ronde.allreduce(np.ones(3), name="cached" if step % 2 else f"new {step}")
    ronde.join()
    ronde.shutdown()
    return reports.texts


@pytest.mark.slow
def test_a_join_may_wait_as_long_as_others_go_on() -> None:
    assert ranks.run(join_long_before_the_others, 2) == [[], []]


def wait_for_a_frozen_rank() -> list[str]:
    ronde.init(stall_warning_ns=LIMIT_NS)
    reports = Reports(and_then=lambda: tell("reported"))
    for _ in range(2):
        ronde.allreduce(np.ones(3), name="cached")
    if ronde.rank() == 1:
        tell("here")
        time.sleep(1)
    ronde.allreduce(np.ones(3), name="cached")
    ronde.shutdown()
    return reports.texts


@pytest.mark.slow
@ON_BOTH
def test_a_stopped_process_is_told_from_others(transport: str) -> None:
    with ranks.start(wait_for_a_frozen_rank, 2, environ={"RONDE_TRANSPORT": transport}) as job:
        assert job.told(1) == "here"
        with faults.stopped(job.pids[1]):
            assert job.told(0) == "reported"
        reports, others = job.results()
        frozen = job.pids[1]
    assert others == []
    (report,) = reports
    assert "'cached' (allreduce)" in report
    expected = (
        f"its process {frozen} is stopped (SIGSTOP) (state T)" if transport == "auto" else "probably stopped"
    )
    assert f"rank 1 on {os.uname().nodename} does not answer: " in report
    assert expected in report


def submit_one_after_the_other() -> list[str]:
    """Rank 1 is missing for some limits; meanwhile rank 0 submits something else."""
    ronde.init(stall_warning_ns=LIMIT_NS // 2)
    reports = Reports()
    x = np.ones(3)
    names = ["first", "second"]
    if ronde.rank() == 0:
        handles = [ronde.allreduce_async(x, name=names[0])]
        time.sleep(1.2)
        handles.append(ronde.allreduce_async(x, name=names[1]))
        time.sleep(1.6)
    else:
        time.sleep(2.8)
        handles = [ronde.allreduce_async(x, name=name) for name in names]
    for handle in handles:
        handle.wait()
    ronde.shutdown()
    return reports.texts


def test_a_stall_is_reported_once_and_another_one_too() -> None:
    reports, none = ranks.run(submit_one_after_the_other, 2)
    assert none == []
    first, second = reports
    assert "stalled: 1 tensor has" in first
    assert "'first'" in first
    assert "stalled: 1 tensor has" in second
    assert "'second'" in second


def wait_in_a_process_set(path: str) -> list[str]:
    """Rank 2 of the set of ranks 1 and 2 is missing; then of all ranks, of which rank 0 has joined."""
    ronde.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    reports = Reports(pipe)
    pair = ronde.ProcessSet([1, 2])
    ronde.add_process_set(pair)
    if ronde.rank() == 2:
        stay_in_user_code("sleeps", pipe)
    if ronde.rank() > 0:
        ronde.allreduce(np.ones(3), name="of two", process_set=pair)
    if ronde.rank() == 2:
        stay_in_user_code("sleeps", pipe)
    if ronde.rank() > 0:
        ronde.allreduce(np.ones(3), name="of all")
    ronde.join()
    ronde.shutdown()
    os.close(pipe)
    return reports.texts


def test_process_sets_and_ranks_that_have_joined(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    told = ranks.run(wait_in_a_process_set, 3, str(tmp_path / "pipe"))
    assert (told[0], told[2]) == ([], [])
    of_two, of_all = told[1]
    assert "'of two'" in of_two
    assert "submitted by rank 1, not by rank 2" in of_two
    assert "'of all'" in of_all
    assert "not by rank 2" in of_all  # of rank 0 nobody expects anything
    for report in told[1]:
        assert lines_of("sleeps")[0] in report


def wait_without_inspection() -> list[str]:
    ronde.init()
    reports = Reports()
    if ronde.rank() == 1:
        time.sleep(2)
    ronde.allreduce(np.ones(3), name="x")
    ronde.shutdown()
    return reports.texts


@pytest.mark.parametrize("variable", ["RONDE_STALL_WARNING=0", "HOROVOD_STALL_CHECK_DISABLE=1"])
def test_who_wants_no_reports_gets_none(variable: str) -> None:
    name, value = variable.split("=")
    environ = {name: value, "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    assert ranks.run(wait_without_inspection, 2, environ=environ) == [[], []]


def wait_until_the_end() -> str:
    ronde.init(stall_warning_ns=0, stall_shutdown_ns=LIMIT_NS)
    x = np.ones(3)
    ronde.allreduce(x, name="x")
    with pytest.raises(AbortedError, match="stalled") as caught:
        ronde.allreduce(x, name="other" if ronde.rank() == 1 else "x")
    with pytest.raises(AbortedError):
        ronde.allreduce(x, name="later")
    ronde.shutdown()
    return str(caught.value)


@ON_BOTH
def test_the_second_limit_ends_the_world_on_every_rank(transport: str) -> None:
    messages = ranks.run(wait_until_the_end, 3, environ={"RONDE_TRANSPORT": transport})
    host = os.uname().nodename
    waits = {
        f"tensor 'x' (allreduce): waited for rank 1 on {host}",
        f"tensor 'other' (allreduce): waited for rank 0 on {host}, rank 2 on {host}",
    }
    for message in messages:  # several ranks may have given up at once
        assert "stall_shutdown is 1 s" in message
        assert any(wait in message for wait in waits), message


def come_late(times: int, by_s: float) -> list[Any]:
    ronde.init()
    for _ in range(times):
        if ronde.rank() == 1:
            time.sleep(by_s)
        for name in ("a", "b"):
            ronde.allreduce(np.ones(3), name=name)
    told = ronde.stragglers()
    ronde.barrier()
    ronde.shutdown()
    return told


@ON_BOTH
def test_who_comes_late_is_known_to_all(transport: str) -> None:
    for told in ranks.run(come_late, 3, 6, 0.1, environ={"RONDE_TRANSPORT": transport}):
        assert [each.rank for each in told] == [0, 1, 2]
        assert [each.tensors for each in told] == [10, 10, 10]  # the first ones were negotiated
        assert {each.host for each in told} == {os.uname().nodename}
        lateness = [each.late_s for each in told]
        assert max(lateness) == lateness[1]
        assert 0.03 < lateness[1] < 1  # on average of "a" and "b", of which only the first is late
        if transport == "auto":
            assert told[1].last >= 5


def keep_own_handlers() -> list[int]:
    """A program's handlers stay its own, whether installed before the engine's or after."""
    heard: list[int] = []
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX - 4):
        signal.signal(number, lambda number, _: heard.append(number))
    ronde.init()
    free = [number for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if _has_default(number)]
    for number in (signal.SIGRTMIN, signal.SIGRTMAX - 5):
        os.kill(os.getpid(), number)
    time.sleep(0)
    ronde.shutdown()
    assert len(free) + 1 == len([n for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if _has_default(n)])
    return heard


def _has_default(number: int) -> bool:
    from ronde import _native

    return not _native.has_handler(number)


def test_signals_of_the_program_are_left_alone() -> None:
    expected = [int(signal.SIGRTMIN), signal.SIGRTMAX - 5]
    assert ranks.run(keep_own_handlers, 2) == [expected, expected]
