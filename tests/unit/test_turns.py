"""Tests that run at once leave the machine to one that runs alone and to quiet ones, and do not overtake them."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.turns import Share, Turns


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


@pytest.mark.parametrize("share", [Share.ALONE, Share.QUIET])
def test_who_wants_more_of_the_machine_waits_for_the_others_and_the_next_wait_for_it(
    processes: list[Turns], tmp_path: Path, share: Share
) -> None:
    first, second, third = processes
    order: list[Share | str] = []

    def run(process: Turns, share: Share) -> None:
        with process.turn(share):
            order.append(share)

    waiting = threading.Thread(target=run, args=(second, share))
    following = threading.Thread(target=run, args=(third, Share.ANY))
    with first.turn(Share.ANY):
        with third.turn(Share.ANY):  # at once
            waiting.start()
        while not is_held(tmp_path / "gate"):
            os.sched_yield()
        following.start()
        order.append("first")
    waiting.join()
    following.join()
    assert order == ["first", share, Share.ANY]
    assert not is_held(tmp_path / "one half")


def test_two_quiet_tests_run_at_once_and_a_third_waits(processes: list[Turns], tmp_path: Path) -> None:
    first, second, third = processes
    has_begun = threading.Event()

    def run() -> None:
        with third.turn(Share.QUIET):
            has_begun.set()

    waiting = threading.Thread(target=run)
    with first.turn(Share.QUIET):
        with second.turn(Share.QUIET):
            waiting.start()
            while not is_held(tmp_path / "gate"):
                os.sched_yield()
            assert not has_begun.is_set()
        waiting.join()
    assert has_begun.is_set()


def test_a_process_that_a_test_has_forked_keeps_no_turn(processes: list[Turns], tmp_path: Path) -> None:
    with processes[0].turn(Share.ALONE):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    os.close(reader)
    with closing(os.fdopen(writer, "wb", buffering=0)):
        assert not is_held(tmp_path / "one half")
    os.waitpid(child, 0)
