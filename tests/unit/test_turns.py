"""Tests that run at once leave the machine to one that wants to be alone, and do not overtake it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.turns import Turns


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Turns]]:
    """What three processes have that run tests: flock() asks which file was opened, not by whom."""
    processes = [Turns(str(tmp_path)) for _ in range(3)]
    yield processes
    for each in processes:
        each.pytest_unconfigure()


def is_held(file: Path) -> bool:
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_wants_to_be_alone_waits_for_the_others_and_the_next_wait_for_it(
    processes: list[Turns], tmp_path: Path
) -> None:
    first, second, third = processes
    order: list[str] = []

    def run(process: Turns, is_alone: bool) -> None:
        with process.turn(is_alone):
            order.append("alone" if is_alone else "next")

    alone = threading.Thread(target=run, args=(second, True))
    following = threading.Thread(target=run, args=(third, False))
    with first.turn(False):
        with third.turn(False):  # at once
            alone.start()
        while not is_held(tmp_path / "gate"):
            os.sched_yield()
        following.start()
        order.append("first")
    alone.join()
    following.join()
    assert order == ["first", "alone", "next"]
    assert not is_held(tmp_path / "machine")


def test_a_process_that_a_test_has_forked_keeps_no_turn(processes: list[Turns], tmp_path: Path) -> None:
    with processes[0].turn(True):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    os.close(reader)
    with closing(os.fdopen(writer, "wb", buffering=0)):
        assert not is_held(tmp_path / "machine")
    os.waitpid(child, 0)
