"""Ranks that die, leave, give up, stop or come late: what the others are told, how soon, and that nothing stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import faults, ranks
from ronde.testing.ranks import tell

PROMISED_S = 1.0  # how soon a death is noticed
SOON_S = 5.0  # what a busy machine may make of that
MIB = 2**20 // 4  # float32 values
ON_BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])


@dataclass(frozen=True)
class Told:
    """How an error looked to the rank that caught it, and when (time.monotonic(): the same on all ranks)."""

    kind: str
    message: str
    rank: int = -1
    host: str = ""
    missing: tuple[int, ...] = ()
    at_s: float = 0.0


def caught(error: Exception) -> Told:
    details = {name: getattr(error, name) for name in ("rank", "host", "missing") if hasattr(error, name)}
    return Told(type(error).__name__, str(error), at_s=time.monotonic(), **details)


def environ(transport: str, **more: str) -> dict[str, str]:
    return {"RONDE_TRANSPORT": transport, **more}


# Death


def reduce_until_error(mib: int) -> tuple[Told, Told]:
    """Returns the error of the collective that was interrupted, and that of the next call."""
    ronde.init()
    world: Any = ronde.world()
    x = np.ones(mib * MIB, np.float32)
    world.allreduce(x, op=ronde.Max, out=x)
    tell()
    try:
        while True:
            world.allreduce(x, op=ronde.Max, out=x)
    except ronde.RondeError as error:
        first = caught(error)
    try:
        world.barrier()
    except ronde.RondeError as error:
        return first, caught(error)
    raise AssertionError("a failed communicator works")


@pytest.mark.parametrize(
    ("n", "victim", "mib"),
    [(2, 1, 32), (4, 0, 32), *(pytest.param(n, 1, 256, marks=pytest.mark.slow) for n in (2, 3))],
)
@ON_BOTH
def test_a_killed_rank_is_named_by_all_others(transport: str, n: int, victim: int, mib: int) -> None:
    with ranks.start(reduce_until_error, n, mib, environ=environ(transport)) as job:
        for rank in range(n):
            job.told(rank)
        time.sleep(0.1)  # until they are in the middle of it
        faults.kill(job.pids[victim])
        killed_s = time.monotonic()
        outcomes = job.outcomes()
    assert "died of SIGKILL" in str(outcomes.pop(victim).error)
    late_s = []
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback_text
        first, second = outcome.value
        assert (first.kind, first.rank, first.host) == ("PeerLostError", victim, socket.gethostname())
        assert first.message == (
            f"rank {victim} on {socket.gethostname()} was lost: its process ended without shutting down"
        )
        assert (second.kind, second.message) == (first.kind, first.message)
        late_s.append(first.at_s - killed_s)
    print(f"noticed after {max(late_s):.3f} s; promised is {PROMISED_S} s")
    assert max(late_s) < SOON_S


def wait_for_rank_1(how: str) -> Told | None:
    ronde.init()
    world: Any = ronde.world()
    try:
        world.barrier()
        if world.rank != 1:
            # Whoever notices first tells the others, who may still be in the call before.
            world.barrier()
        elif how == "shuts down":
            ronde.shutdown()
        elif how == "raises":
            raise ValueError("the loss is not a number")
        elif how == "exits at once":
            os._exit(3)
        if world.rank == 1:
            return None
    except ronde.RondeError as error:
        return caught(error)
    raise AssertionError("a barrier without rank 1")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("returns", "has shut down after 1 collective calls and takes no part in this one"),
        ("shuts down", "has shut down after 1 collective calls and takes no part in this one"),
        ("raises", "has shut down after 1 collective calls and takes no part in this one"),
        ("exits at once", "was lost: its process ended without shutting down"),
    ],
)
@ON_BOTH
def test_who_leaves_while_the_others_need_it_is_named(transport: str, how: str, reason: str) -> None:
    with ranks.start(wait_for_rank_1, 3, how, environ=environ(transport)) as job:
        outcomes = job.outcomes()
    for rank in (0, 2):
        told = outcomes[rank].value
        assert (told.kind, told.rank, told.host) == ("PeerLostError", 1, socket.gethostname())
        assert told.message == f"rank 1 on {socket.gethostname()} {reason}"
    assert isinstance(outcomes[1].error, ValueError) == (how == "raises")


def outlive_rank_1() -> float:
    """What does not need the rank that has left still works."""
    ronde.init()
    world: Any = ronde.world()
    pair = world.group([0, 2])
    if world.rank == 1:
        world.send(np.array([7.0]), 0)
        ronde.shutdown()
        return 0.0
    received = np.zeros(1)
    time.sleep(0.3)
    if world.rank == 0:
        world.recv(received, 1)  # what was sent before it left
        has_left = r"^rank 1 on \S+ (has shut down|closed its connection)$"
        with pytest.raises(ronde.PeerLostError, match=has_left) as error:
            world.recv(received, 1)
        assert error.value.rank == 1
        with pytest.raises(ronde.PeerLostError, match=has_left):
            world.send(np.ones(32 * MIB, np.float32), 1)
    total: float = pair.allreduce(received)[0]
    return total


@ON_BOTH
def test_who_has_left_is_missed_only_by_those_who_need_it(transport: str) -> None:
    assert ranks.run(outlive_rank_1, 3, environ=environ(transport)) == [7.0, 0.0, 7.0]


# Giving up


def abort_from_a_thread() -> tuple[Told, Told]:
    ronde.init()
    world: Any = ronde.world()
    world.barrier()
    thread = threading.Timer(0.3, world.abort, ["the loss is not a number"])
    if world.rank == 0:
        thread.start()
    told = []
    for call in (lambda: world.recv(np.zeros(3), (world.rank + 1) % 3), world.barrier):
        try:
            call()
        except ronde.RondeError as error:
            told.append(caught(error))
    if world.rank == 0:
        thread.join()
    return told[0], told[1]


@ON_BOTH
def test_abort_reaches_every_rank(transport: str) -> None:
    for told in ranks.run(abort_from_a_thread, 3, environ=environ(transport)):
        for each in told:
            assert (each.kind, each.rank, each.host) == ("AbortedError", 0, socket.gethostname())
            assert each.message == f"rank 0 on {socket.gethostname()} aborted: the loss is not a number"


def wait_interrupted() -> str | Told:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in the background
    handled = []
    signal.signal(signal.SIGUSR2, lambda *_: handled.append("SIGUSR2"))
    ronde.init()
    world: Any = ronde.world()
    world.barrier()
    try:
        if world.rank == 0:
            tell()
        else:
            time.sleep(1.5)
        world.allreduce(np.ones(1000))
        return "no error"
    except KeyboardInterrupt:
        assert handled == ["SIGUSR2"]  # this handler has run, and did not end the call
        return "interrupted"
    except ronde.RondeError as error:
        return caught(error)


@ON_BOTH
def test_ctrl_c_ends_a_call(transport: str) -> None:
    with ranks.start(wait_interrupted, 2, environ=environ(transport)) as job:
        job.told(0)
        for signum in (signal.SIGUSR2, signal.SIGINT):
            time.sleep(0.3)
            os.kill(job.pids[0], signum)
        interrupted, told = job.results()
    assert interrupted == "interrupted"
    assert (told.kind, told.rank) == ("AbortedError", 0)
    assert told.message == f"rank 0 on {socket.gethostname()} aborted: interrupted by a signal"


# Stopped and late


def reduce_for(seconds: float, mib: int) -> int:
    """Rank 0 decides when it is over. Returns how many calls that were."""
    ronde.init()
    world: Any = ronde.world()
    x, calls, end_s = np.zeros(mib * MIB, np.float32), 0, time.monotonic() + seconds
    tell()
    while True:
        x[0] = world.rank == 0 and time.monotonic() > end_s
        x[1:] = 1
        world.allreduce(x, out=x)
        calls += 1
        assert (x[1:] == world.size).all()
        if x[0]:
            ronde.shutdown()
            return calls


def submit_one_by_one(count: int) -> int:
    """Each tensor becomes ready on its own, and each host tells rank 0 of it. Returns how many that were."""
    ronde.init()
    names = [f"tensor {number}" for number in range(count)]
    for handle in [ronde.allreduce_async(np.ones(1, np.float32), name=name) for name in names]:
        handle.wait()  # now they are cached
    tell()
    time.sleep(1)
    handles = []
    for name in names:
        handles.append(ronde.allreduce_async(np.ones(1, np.float32), name=name))
        time.sleep(0.002)
    assert all(handle.wait()[0] == 1 for handle in handles)
    ronde.shutdown()
    return len(handles)


def sleep_for(seconds: float) -> int:
    """All ranks are idle, then make a call."""
    ronde.init()
    world: Any = ronde.world()
    world.barrier()
    tell()
    time.sleep(seconds)
    assert world.allreduce(np.array([1]))[0] == world.size
    ronde.shutdown()
    return 1


def stop_for(seconds: float, jobs: list[ranks.Job]) -> None:
    """Stops rank 1 of each job for so long, then waits until all of them have ended well."""
    for job in jobs:
        job.told(1)
    time.sleep(0.1)
    for job in jobs:
        faults.stop(job.pids[1])
    time.sleep(seconds)
    for job in jobs:
        faults.resume(job.pids[1])
        assert min(job.results()) >= 1


@ON_BOTH
def test_a_stopped_rank_is_waited_for(transport: str) -> None:
    with (
        ranks.start(reduce_for, 3, 2.0, 8, environ=environ(transport)) as busy,
        ranks.start(sleep_for, 2, 1.0, environ=environ(transport)) as idle,
    ):
        stop_for(2.0, [busy, idle])


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_long_is_waited_for() -> None:
    """Much longer than RONDE_PEER_TIMEOUT, from which keepalives follow: 15 s to 2 s."""

    def patient(transport: str) -> dict[str, str]:
        return environ(transport, RONDE_PEER_TIMEOUT="2")

    with (
        ranks.start(reduce_for, 2, 15.0, 32, environ=patient("auto")) as busy,
        ranks.start(reduce_for, 2, 15.0, 32, environ=patient("tcp")) as busy_on_tcp,
        ranks.start(sleep_for, 2, 12.0, environ=patient("auto")) as idle,
        ranks.start(sleep_for, 2, 12.0, environ=patient("tcp")) as idle_on_tcp,
    ):
        stop_for(15.0, [busy, busy_on_tcp, idle, idle_on_tcp])


def come_late(folder: Path) -> Told:
    """Ranks 1 and 2 come when the time limit of the others is over."""
    ronde.init()
    world: Any = ronde.world()
    world.barrier()
    while world.rank in (1, 2) and len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    try:
        world.allreduce(np.ones(6), op=ronde.Max)
    except ronde.RondeError as error:
        (folder / str(world.rank)).touch()
        return caught(error)
    raise AssertionError("no error")


@ON_BOTH
def test_a_time_limit_names_who_did_not_come(transport: str, tmp_path: Path) -> None:
    told = ranks.run(come_late, 4, tmp_path, environ=environ(transport, RONDE_TIMEOUT="0.5"))
    host = socket.gethostname()
    for each in told:
        assert each.kind == "TimeoutError"
        # Across hosts a rank waits for its partner of the moment only.
        assert re.match(
            rf"timed out: waited 500 ms in allreduce of 6 float64 by max for rank [12] on {host}",
            each.message,
        )
    missing = {each.missing for each in told}
    assert missing <= ({(1, 2)} if transport == "auto" else {(1,), (2,)})


# Under `ronde run`


def test_the_launcher_names_the_killed_worker(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, numpy, ronde\n"
        "ronde.init()\n"
        "x = numpy.ones(8 << 20)\n"
        "ronde.world().barrier()\n"
        "print(os.getpid(), flush=True)\n"
        "while True: ronde.world().allreduce(x, op=ronde.Max, out=x)\n"
    )
    command = [sys.executable, "-m", "ronde", "run", "-n", "3", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = dict(launcher.stdout.readline().split() for _ in range(3))
        time.sleep(0.1)
        faults.kill(int(pids["[1]"]))
        killed_s = time.monotonic()
        _, errors = launcher.communicate(timeout=60)
        print(f"ronde run has ended after {time.monotonic() - killed_s:.3f} s")
    assert launcher.returncode == 137
    assert re.search(rf"^ronde: rank 1 \(pid {pids['[1]']}\) was killed by SIGKILL", errors, re.MULTILINE)
    for rank in (0, 2):
        assert f"[{rank}] ronde.errors.PeerLostError: rank 1 on {socket.gethostname()} was lost" in errors
