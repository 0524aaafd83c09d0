"""The end of the program `ronde`: as Python ends, and nothing is lost."""

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


def test_it_ends_by_the_exit_of_python() -> None:
    """Profilers and tracers write their results then."""
    assert outcome(IS_CAUGHT) == (0, "exit 3\n", "")
