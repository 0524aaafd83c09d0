"""Tests in several processes at once (`pytest -n 8`, by pytest-xdist), and some of them with less beside them.

Most tests wait most of the time, so several at once finish sooner even on one core. Tests that measure, fill or starve
the machine, or that use a name of which it has only one, are marked `alone`. Tests in which a silence of a few seconds
is a death are marked `quiet`: at most two of them run at once, and nothing else.

There are three locks, each a file in a folder that the processes share. Two stand for the halves of the machine: a test
that is alone holds both exclusively, a quiet test holds one exclusively, any other test holds both shared. A waiting
test holds `gate`, so that later tests cannot overtake it.

The quiet tests and then those that run alone come last. xdist's scheduler would give each process dozens of tests in
advance, so that one has such tests while the others still have long ones, and each of both kinds waits for one of the
other. `FewInAdvance` gives a process the next few tests when it has begun its last one.

Each process collects all tests. In a fresh clone most of that is the compilation of test files, so there is a lock for
each of them, too: the first process compiles it, and the others find the bytecode.
"""

from __future__ import annotations

import enum
import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import pytest
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

FEW = 8  # tests that a process gets at once; with one, each process would make the fixtures of all modules


class Share(enum.IntEnum):
    """What a test needs of the machine. Tests run in the order of these numbers."""

    ANY = 0
    QUIET = 1
    ALONE = 2


class FewInAdvance(LoadScheduling):
    """Gives a process its next tests when it has only the one left that it waits to run until it knows the next."""

    def check_schedule(self, node: WorkerController, duration: float = 0) -> None:
        if not self.pending or len(self.node2pending[node]) < 2:
            super().check_schedule(node)


class Worker(Protocol):
    """The part of xdist's controller of one worker process that this module uses."""

    workerinput: dict[str, Any]


class Shared:
    """In the process that distributes the tests: a few at a time, and one folder for all workers."""

    def __init__(self, config: pytest.Config) -> None:
        if config.option.maxschedchunk is None:
            config.option.maxschedchunk = FEW
        self._folder = tempfile.TemporaryDirectory(prefix="ronde-turns-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> LoadScheduling | None:
        return FewInAdvance(config, log) if config.option.dist == "load" else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Worker) -> None:
        node.workerinput["turns"] = self._folder.name

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Turns:
    """In each process that runs tests."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._gate, *self._halves = (
            os.open(Path(folder, name), os.O_RDWR | os.O_CREAT) for name in ("gate", "one half", "other half")
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with (self._folder / str(crc32(bytes(collector.path)))).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests last that wait for all running ones."""
        items.sort(key=_share)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before a time limit begins
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self.turn(_share(item)):
            return (yield)

    @contextmanager
    def turn(self, share: Share) -> Iterator[None]:
        """Hold this share of the machine for one test."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        if share is Share.QUIET:
            self._lock_one_half()
        else:
            for half in self._halves:
                fcntl.flock(half, fcntl.LOCK_EX if share is Share.ALONE else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not by closing them: a process that the test has forked may have them open, too.
            for half in self._halves:
                fcntl.flock(half, fcntl.LOCK_UN)

    def _lock_one_half(self) -> None:
        """Lock a half that is free, or else one of them: the other may become free sooner, which costs little."""
        first, second = self._halves
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(second, fcntl.LOCK_EX)

    def pytest_unconfigure(self) -> None:
        for lock in (self._gate, *self._halves):
            os.close(lock)


def _share(item: pytest.Item) -> Share:
    if item.get_closest_marker("alone") is not None:
        return Share.ALONE
    return Share.ANY if item.get_closest_marker("quiet") is None else Share.QUIET
