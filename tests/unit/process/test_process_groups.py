"""Process groups that outlive a killed launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ronde.process.process_groups import Guard

HANGING_S = 60
DIES = """
import os, sys
from ronde.process.process_groups import Guard
guard = Guard(sys.argv[1])
for group in map(int, sys.argv[2:]):
    guard.add(group)
guard.discard(int(sys.argv[2]))
os.kill(os.getpid(), 9)
"""


def group() -> subprocess.Popen[bytes]:
    """A shell and its children."""
    process = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo ready; wait"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_killed_launchers_guarded_groups_die_whole(tmp_path: Path) -> None:
    gone, guarded, also = group(), group(), group()
    temporary = tmp_path / "a b"
    (temporary / "inner").mkdir(parents=True)
    numbers = [str(each.pid) for each in (gone, guarded, also)]
    subprocess.run([sys.executable, "-c", DIES, str(temporary), *numbers], check=False)
    for each in (guarded, also):
        out, _ = each.communicate(timeout=HANGING_S)
        assert out == b"", "its pipe is at its end: nobody is left"
        assert each.returncode == -signal.SIGKILL
    while temporary.exists():
        time.sleep(0.01)
    assert gone.poll() is None, "whose number may be somebody else's by now"
    os.killpg(gone.pid, signal.SIGKILL)
    gone.communicate(timeout=HANGING_S)


FLOODS = """
import os, sys
from ronde.process.process_groups import Guard
guard = Guard()
guard.add(int(sys.argv[1]))
for group in range(5_000_000, 5_020_000):  # there are no such numbers
    guard.add(group)
    guard.discard(group)
os.kill(os.getpid(), 9)
"""


def test_a_shell_that_does_not_keep_up_forgets_no_group() -> None:
    guarded = group()
    subprocess.run([sys.executable, "-c", FLOODS, str(guarded.pid)], check=False)
    guarded.communicate(timeout=HANGING_S)
    assert guarded.returncode == -signal.SIGKILL


def test_a_closed_guard_kills_no_group(tmp_path: Path) -> None:
    process = group()
    guard = Guard(str(tmp_path))
    guard.add(process.pid)
    guard.close()
    assert process.poll() is None
    assert tmp_path.exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANGING_S)


def test_without_a_shell_all_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.process.process_groups._SHELL", "/nowhere/sh")
    guard = Guard()
    guard.add(1)
    guard.close()
