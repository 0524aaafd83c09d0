"""Measures how long after a fault the caller of `ronde.spark.run` has an error, on a Spark of this machine.

    python benchmarks/cluster_faults.py

Two executors, each a JVM of its own with one slot, are on this machine; the fault is on rank 1 while rank 0 goes on for
ten minutes. The table shows the time from the fault to the error, and the beginning of the error. Where the fault is
known before a task starts, or is a time limit, the time counts from the call, or from the limit. For the driver's death
it is the time until no rank and no agent runs. It needs PySpark.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from case_tables import print_load
from clusters import start_session

FOREVER_S = 600
START_TIMEOUT_S = 8.0
MESSAGE_CHARACTERS = 100
ANCESTORS = ("rank", "agent", "Python worker", "daemon", "executor")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--driver-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    session = start_session(2)
    if options.driver_in:
        run(wait, options.driver_in)
    print_load()
    run(os.getpid)  # Spark has started its Python workers then
    print(f"\n{'fault':58}{'seconds':>9}  error")
    for name in options.faults:
        with tempfile.TemporaryDirectory(prefix="ronde-faults-") as folder:
            took_s, message = FAULTS[name](session.sparkContext, Path(folder))
        print(f"{name:58}{took_s:9.2f}  {message[:MESSAGE_CHARACTERS]}", flush=True)
    session.stop()


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call the function on two ranks, without output."""
    from ronde import spark

    options = {"num_proc": 2, "stdout": io.StringIO(), "stderr": io.StringIO(), "verbose": 0, **options}
    results: list[Any] = spark.run(fn, args, **options)
    return results


def error_of(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, str]:
    """Return when the error of the job came, and its first line."""
    from ronde import RondeError

    try:
        run(fn, *args, **options)
    except RondeError as error:
        return time.monotonic(), f"{type(error).__name__}: {error}".splitlines()[0]
    raise RuntimeError("the job has succeeded in spite of its fault")


# Functions of the ranks


def note_fault(folder: Path) -> None:
    """Note the time, which is that of all processes of this machine."""
    (folder / "new").write_text(str(time.monotonic()))
    (folder / "new").rename(folder / "fault")


def fail(folder: Path, how: str) -> None:
    """Raise, or exit with code 3, on rank 1."""
    if os.environ["RANK"] == "1":
        note_fault(folder)
        if how == "exit":
            sys.exit(3)
        raise LookupError("no such column")
    time.sleep(FOREVER_S)


def wait(folder: Path) -> None:
    """Note the processes above rank 1, up to the executor, and go on."""
    if os.environ["RANK"] == "1":
        pids, pid = [os.getpid()], os.getpid()
        while len(pids) < len(ANCESTORS):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            # A template, from which the rank was forked, may stand between it and the agent.
            if len(pids) > 1 or "agent_main" in Path(f"/proc/{pid}/cmdline").read_text():
                pids.append(pid)
        (folder / "new").write_text(" ".join(map(str, pids)))
        (folder / "new").rename(folder / "pids")
    time.sleep(FOREVER_S)


# Faults: each returns the seconds to the error, and the error


def fails_by_itself(how: str) -> Callable[[Any, Path], tuple[float, str]]:
    """Return the fault of a rank that raises an exception or exits, before `init`."""

    def measure(_: Any, folder: Path) -> tuple[float, str]:
        at_s, message = error_of(fail, folder, how)
        return at_s - float((folder / "fault").read_text()), message

    return measure


def interrupted(act: Callable[[Any, list[int]], None]) -> Callable[[Any, Path], tuple[float, str]]:
    """Return the fault that `act` causes while the ranks run; it gets the Spark context and the processes."""

    def measure(context: Any, folder: Path) -> tuple[float, str]:
        def cause() -> None:
            pids = pids_in(folder)
            note_fault(folder)
            act(context, pids)

        thread = threading.Thread(target=cause)
        thread.start()
        at_s, message = error_of(wait, folder)
        thread.join()
        return at_s - float((folder / "fault").read_text()), message

    return measure


def killed(victim: str) -> Callable[[Any, Path], tuple[float, str]]:
    """Return the fault of a process that is killed."""
    return interrupted(lambda _, pids: os.kill(pids[ANCESTORS.index(victim)], signal.SIGKILL))


def kill_driver(_: Any, folder: Path) -> tuple[float, str]:
    """Kill a driver in a process of its own, and wait until nothing of its job runs."""
    words = [sys.executable, __file__, "--driver-in", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        rank, agent, *_rest = pids_in(folder)
        driver.kill()
    began_s = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in (rank, agent)):
        time.sleep(0.01)
    return time.monotonic() - began_s, "nothing keeps running"


def ask_too_much(_: Any, folder: Path) -> tuple[float, str]:
    began_s = time.monotonic()
    at_s, message = error_of(fail, folder, "raise", num_proc=4, start_timeout=START_TIMEOUT_S)
    return at_s - began_s - START_TIMEOUT_S, message


def send_the_unpicklable(_: Any, folder: Path) -> tuple[float, str]:
    began_s = time.monotonic()
    at_s, message = error_of(fail, threading.Lock(), folder)
    return at_s - began_s, message


def fail_in_a_thread(context: Any, folder: Path) -> tuple[float, str]:
    found: list[tuple[float, str]] = []
    thread = threading.Thread(target=lambda: found.append(fails_by_itself("raise")(context, folder)))
    thread.start()
    thread.join()
    return found[0]


def fail_beside_another_job(_: Any, folder: Path) -> tuple[float, str]:
    """Let the only rank of one job fail while that of another one goes on, which must succeed."""
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.extend(run(time.sleep, 5, num_proc=1)))
    other.start()

    def fail_alone() -> NoReturn:
        note_fault(folder)
        raise LookupError("no such column")

    at_s, message = error_of(fail_alone, num_proc=1)
    other.join()
    if results != [None]:
        raise RuntimeError("the other job has failed, too")
    return at_s - float((folder / "fault").read_text()), message


def pids_in(folder: Path) -> list[int]:
    """Wait until rank 1 has noted its processes; return them."""
    while True:
        with suppress(FileNotFoundError):
            return [int(word) for word in (folder / "pids").read_text().split()]
        time.sleep(0.01)


FAULTS: dict[str, Callable[[Any, Path], tuple[float, str]]] = {
    "an exception before init, while the other rank sleeps": fails_by_itself("raise"),
    "a rank is killed": killed("rank"),
    "the agent of a rank is killed": killed("agent"),
    "a Python worker of Spark is killed": killed("Python worker"),
    "the JVM of an executor is killed": killed("executor"),
    "the driver is killed": kill_driver,
    "4 ranks on 2 slots (from start_timeout)": ask_too_much,
    "an argument that cannot be pickled (from the call)": send_the_unpicklable,
    "a rank exits with code 3": fails_by_itself("exit"),
    "an exception in a job of another thread than the main one": fail_in_a_thread,
    "an exception in one of two jobs at once": fail_beside_another_job,
    "the Spark job is cancelled, as in Spark's UI": interrupted(lambda context, _: context.cancelAllJobs()),
}


if __name__ == "__main__":
    main()
