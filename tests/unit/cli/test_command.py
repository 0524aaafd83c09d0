"""The end of the program `ronde`: it skips the freeing of objects, and loses nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGINNING = """
import sys, threading, time
import ronde.cli
ronde.cli.main = lambda: 3

def work():
    time.sleep(0.2)
    print("done")
"""
IS_CAUGHT = """
try:
    ronde.cli.command()
except SystemExit as error:
    print("exit", error.code)
"""


def outcome(program: str) -> tuple[int, str, str]:
    """Return the exit code and the outputs of a program that ends as `ronde` does."""
    command = [sys.executable, "-c", BEGINNING + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=work).start()",
        "import concurrent.futures as f; f.ThreadPoolExecutor().submit(work)",
        "import atexit; atexit.register(work)",
    ],
    ids=["thread", "task", "atexit"],
)
def test_it_waits_for_work(start: str) -> None:
    assert outcome(f"{start}\nronde.cli.command()") == (3, "done\n", "")


def test_a_closed_output_is_no_error() -> None:
    assert outcome("sys.stdout.close()\nronde.cli.command()") == (3, "", "")


@pytest.mark.parametrize(
    "observe",
    [
        "sys.setprofile(lambda *_: None)",
        "sys.settrace(lambda *_: None)",
        pytest.param(
            "sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, 'test')",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12"
            ),
        ),
    ],
    ids=["profiler", "tracer", "monitoring"],
)
def test_python_ends_as_usual_for_a_profiler(observe: str) -> None:
    assert outcome(f"{observe}\n{IS_CAUGHT}") == (0, "exit 3\n", "")


def test_otherwise_the_process_ends_at_once() -> None:
    assert outcome(IS_CAUGHT) == (3, "", "")
