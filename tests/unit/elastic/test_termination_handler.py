"""What a process does before SIGTERM ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from ronde.elastic.termination_handler import TerminationHandler


def run(program: str) -> tuple[int, str]:
    """Return how a process ends that has last words, and what it prints."""
    begin = """
    import os, signal
    from ronde.elastic.termination_handler import TerminationHandler
    handler = TerminationHandler(lambda: print("last words", flush=True))
    def end():
        os.kill(os.getpid(), signal.SIGTERM)
        print("after the signal", flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program)],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stdout


def test_they_come_before_the_signal_ends_the_process() -> None:
    assert run("with handler.installed(): end()") == (-signal.SIGTERM, "last words\n")


def test_a_change_of_the_state_ends_first() -> None:
    program = """
    with handler.installed():
        with handler.deferring():
            with handler.deferring():
                end()
            print("changed", flush=True)
        print("never")
    """
    assert run(program) == (-signal.SIGTERM, "after the signal\nchanged\nlast words\n")


def test_a_forked_child_has_none() -> None:
    program = """
    with handler.installed(), handler.deferring():
        child = os.fork()
        if child == 0:
            end()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    assert run(program) == (0, f"{-signal.SIGTERM}\n")


def test_the_handler_of_the_program_stays() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        with TerminationHandler(lambda: pytest.fail("the program handles the signal")).installed():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
