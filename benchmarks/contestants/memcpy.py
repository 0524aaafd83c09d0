"""The limit: every rank copies the bytes from one private buffer to another, all ranks at once."""

from __future__ import annotations

import mmap
import os

import numpy as np

from contestants import OPERATIONS, Call
from contestants.buffers import touched
from ronde import settings


class Memcpy:
    """Ranks that share nothing but a page (the file MEMCPY_PAGE) where they meet to start together."""

    def __init__(self) -> None:
        environment = settings.environment()
        self.rank = int(environment["RANK"])
        self.size = int(environment["WORLD_SIZE"])
        with open(environment["MEMCPY_PAGE"], "r+b") as page:
            shared = mmap.mmap(page.fileno(), mmap.PAGESIZE)
        self._arrivals = np.frombuffer(shared, np.int64)[: self.size]

    def barrier(self, count: int = 0) -> Call:
        """Spin until all ranks have arrived as often as this one."""

        def call() -> None:
            self._arrivals[self.rank] += 1
            while self._arrivals.min() < self._arrivals[self.rank]:
                os.sched_yield()

        return call

    def _copy(self, count: int) -> Call:
        source, destination = touched(count), touched(count)
        return lambda: np.copyto(destination, source)


for _operation in OPERATIONS:  # the same copy is the measure of everything that moves bytes
    if _operation != "barrier":
        setattr(Memcpy, _operation, Memcpy._copy)
