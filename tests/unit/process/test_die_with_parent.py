"""The two programs that run between the launcher and a worker do the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ronde.process.die_with_parent

PYTHON = ronde.process.die_with_parent.__file__
NATIVE = [path for folder in ronde.process.__path__ if (path := Path(folder, "start_worker")).exists()]


@pytest.fixture(params=["native", "python"])
def starter(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "python":
        return [sys.executable, "-I", "-S", PYTHON]
    if not NATIVE:
        pytest.skip("start_worker was not built")
    return [str(NATIVE[0])]


def run(starter: list[str], *words: str, parent: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [*starter, str(parent or os.getpid()), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_becomes_the_command(starter: list[str]) -> None:
    done = run(starter, "any", "/bin/sh", "-c", "echo $0 $1; exit 7", "a b", "c")
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b c\n", "")


def test_binds_to_cores(starter: list[str]) -> None:
    core = max(os.sched_getaffinity(0))
    say = "import os; print(sorted(os.sched_getaffinity(0)))"
    assert run(starter, str(core), sys.executable, "-c", say).stdout == f"[{core}]\n"
    everywhere = sorted(os.sched_getaffinity(0))
    assert run(starter, ",".join(map(str, everywhere)), sys.executable, "-c", say).stdout == f"{everywhere}\n"


def test_says_why_it_cannot_start(starter: list[str]) -> None:
    done = run(starter, "any", "/nowhere/program")
    assert (done.returncode, done.stderr) == (
        126,
        "cannot start /nowhere/program: No such file or directory\n",
    )


def test_signals_that_python_ignores_are_not_ignored(starter: list[str]) -> None:
    ignoring = subprocess.run(
        [*starter, str(os.getpid()), "any", "/bin/sh", "-c", "kill -PIPE $$; echo still here"],
        check=False,
        capture_output=True,
        restore_signals=False,
    )
    assert (ignoring.returncode, ignoring.stdout) == (-signal.SIGPIPE, b"")


def test_signals_that_the_launcher_blocks_are_not_blocked(starter: list[str]) -> None:
    say = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        assert run(starter, "any", sys.executable, "-c", say).stdout == "set()\n"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_does_not_outlive_its_parent(starter: list[str]) -> None:
    """Neither a parent that dies later, nor one that is already dead."""
    assert run(starter, "any", "/bin/sleep", "600", parent=1).returncode == -signal.SIGKILL
    parent = (
        "import os, subprocess, sys, time; words = [str(os.getpid()), 'any', '/bin/sh', '-c']; "
        "child = subprocess.Popen([*sys.argv[1:], *words, 'echo ready; exec sleep 600']); "
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent, *starter], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    while any(_lives(pid) for pid in children):
        time.sleep(0.01)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
