"""Ronde's communicator, on private and on symmetric memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import ronde
from contestants import Call
from contestants.buffers import Floats, ping_pong, touch, touched


class Private:
    """One rank of `ronde.world()`, with ordinary NumPy arrays."""

    def __init__(self) -> None:
        ronde.init()
        self._world: Any = ronde.world()
        self.rank: int = self._world.rank
        self.size: int = self._world.size

    def buffer(self, count: int) -> Floats:
        return touched(count)

    def barrier(self, count: int = 0) -> Call:
        barrier: Call = self._world.barrier
        return barrier

    def allreduce(self, count: int) -> Call:
        x, allreduce = self.buffer(count), self._world.allreduce
        return lambda: allreduce(x, out=x)

    def allgather(self, count: int) -> Call:
        x, out, allgather = self.buffer(count // self.size), self.buffer(count), self._world.allgather
        return lambda: allgather(x, out=out)

    def broadcast(self, count: int) -> Call:
        x, broadcast = self.buffer(count), self._world.broadcast
        return lambda: broadcast(x, 0, out=x)

    def reducescatter(self, count: int) -> Call:
        x, out, reducescatter = self.buffer(count), self.buffer(count // self.size), self._world.reducescatter
        return lambda: reducescatter(x, out=out)

    def alltoall(self, count: int) -> Call:
        x, out, alltoall = self.buffer(count), self.buffer(count), self._world.alltoall
        return lambda: alltoall(x, out=out)

    def reduce(self, count: int) -> Call:
        x, out, reduce = self.buffer(count), self.buffer(count), self._world.reduce
        return lambda: reduce(x, 0, out=out)

    def gather(self, count: int) -> Call:
        x, out, gather = self.buffer(count // self.size), self.buffer(count), self._world.gather
        return lambda: gather(x, 0, out=out)

    def scatter(self, count: int) -> Call:
        x, out, scatter = self.buffer(count), self.buffer(count // self.size), self._world.scatter
        return lambda: scatter(x, 0, out=out)

    def sendrecv(self, count: int) -> Call:
        x, neighbour = self.buffer(count), self.rank ^ 1
        return ping_pong(
            self.rank, lambda: self._world.send(x, neighbour), lambda: self._world.recv(x, neighbour)
        )


class Symmetric(Private):
    """The same with all buffers in symmetric memory."""

    def buffer(self, count: int) -> Floats:
        return touch(self._world.empty(count, np.float32))
