"""The programs of docs/debugging.md, with a user at the debugger."""

from __future__ import annotations

import re
import socket
import time

import pytest
from tests.ranks.launcher.test_launcher import Launcher, end
from tests.ranks.pages import runs

PROGRAMS = {run.command.split()[-1]: run.program for run in runs("docs/debugging.md")}


def test_breakpoint_reads_the_terminal_of_the_launcher(launcher: Launcher) -> None:
    launcher.script(PROGRAMS["look.py"], "look.py")
    job = launcher.start("-n", "2", "look.py")
    out, err = job.communicate(b"p total\nc\n", timeout=60)
    assert job.returncode == 0, err
    assert b"array(1.)" in out
    assert out.count(b"total 1.0") == 2


def test_pdb_at_another_rank_by_a_socket(launcher: Launcher) -> None:
    launcher.script(PROGRAMS["look_anywhere.py"], "look_anywhere.py")
    job = launcher.start("-n", "2", "look_anywhere.py")
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(str(launcher.folder / "pdb-1")):
            assert job.poll() is None, end(job)
            time.sleep(0.02)
        client.sendall(b"p ronde.rank(), total\nc\n")
        client.shutdown(socket.SHUT_WR)
        with client.makefile() as answers:
            seen = answers.read()
    code, out, err = end(job)
    assert (code, out.count("total 1.0")) == (0, 2), err
    assert re.search(r"\(1, array\(1\.\)\)", seen), seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_the_variable_no_rank_waits_for_a_debugger(launcher: Launcher, ranks: int) -> None:
    launcher.script(PROGRAMS["attach.py"], "attach.py")
    code, out, err = launcher.run("-n", str(ranks), "attach.py")
    assert (code, out.count("goes on")) == (0, ranks), err
