"""One rank of a contestant: does what the driver says, and sleeps in a read in between.

    python serving.py CONTESTANT SOCKET      # by mpirun; other ranks call serve() in a process started by Ronde

The driver holds the other end of the Unix socket. A request is (what, arguments), an answer (went well, value).
"""

from __future__ import annotations

import gc
import itertools
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from contestants import Call, join


class Rank:
    """The requests that a rank answers: every public method is one."""

    def __init__(self, contestant: str) -> None:
        self._contestant = join(contestant)
        self._barrier: Call = self._contestant.barrier()
        self._call: Call | None = None

    def rank(self) -> int:
        """This rank's number."""
        return int(self._contestant.rank)

    def prepare(self, operation: str, count: int) -> None:
        """Allocate the buffers for an operation and let go of those for the one before."""
        self._call = None
        gc.collect()
        make: Callable[[int], Call] | None = getattr(self._contestant, operation, None)
        if make is None:
            raise NotImplementedError(f"has no {operation}")
        self._call = make(count)

    def measure(self, calls: int) -> float:
        """Make the calls one after the other, together with the other ranks; return the seconds per call."""
        call = self._call
        assert call is not None
        self._barrier()
        began = time.perf_counter()
        for _ in itertools.repeat(None, calls):
            call()
        return (time.perf_counter() - began) / calls


def serve(contestant: str, path: str) -> None:
    """Answer requests until the driver hangs up. The first answer tells whether this rank could join."""
    gc.disable()
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    connection: Connection[Any, Any] = Connection(channel.detach())
    try:
        rank = Rank(contestant)
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))
        return
    connection.send((True, rank.rank()))
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(rank, what)(*arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(*sys.argv[1:])
