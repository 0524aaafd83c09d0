"""Tests in several processes at once (`pytest -n 8`, by pytest-xdist), and those marked `alone` when nothing else runs.

Most tests wait most of the time, so several at once finish sooner even on one core. Tests that measure, fill or starve
the machine, or that use a name of which it has only one, are marked `alone`.

There are two locks, each a file in a folder that the processes share. A test holds `machine`, shared or exclusively; a
waiting test holds `gate`, so that later tests cannot overtake one that wants to be alone.

The tests that run alone come last. xdist would hand out the last hundreds at once, so that one process has such tests
while the others still have long ones, and each of both kinds waits for one of the other. It hands out a few at a time.

Each process collects all tests. In a fresh clone most of that is the compilation of test files, so there is a lock for
each of them, too: the first process compiles it, and the others find the bytecode.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import pytest

FEW = 8  # tests that xdist hands out at once; with one, each process would make the fixtures of all modules


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
    def pytest_configure_node(self, node: Worker) -> None:
        node.workerinput["turns"] = self._folder.name

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class Turns:
    """In each process that runs tests."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._gate, self._machine = (
            os.open(Path(folder, name), os.O_RDWR | os.O_CREAT) for name in ("gate", "machine")
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
        """Put the tests that run alone last, because each one waits for all running tests."""
        items.sort(key=_is_alone)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before a time limit begins
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self.turn(_is_alone(item)):
            return (yield)

    @contextmanager
    def turn(self, is_alone: bool) -> Iterator[None]:
        """Hold the machine for one test."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not by closing it: a process that the test has forked may have it open, too.
            fcntl.flock(self._machine, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        os.close(self._gate)
        os.close(self._machine)


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None
