"""The store in which the workers of one round meet, if this node has group rank 0.

It has an address at once. The server is loaded when the first worker connects, or shortly after the start: a short job
that needs no store does not wait for one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ronde.job_key import JobKey
from ronde.launch.loop import Loop, Order

if TYPE_CHECKING:
    from ronde.stores.server import StoreServer

__all__ = ["RoundStore"]

MOMENT_NS = 200_000_000
BACKLOG = 4096


class RoundStore:
    """A store at a numeric TCP address of this host, or at an abstract Unix socket if `host` is empty.

    Each store has a new address. `give_up` gets a sentence when workers can no longer connect. Raises UsageError if
    this machine does not have the address.
    """

    def __init__(self, host: str, key: JobKey, loop: Loop, give_up: Callable[[str], object]) -> None:
        self._key = key
        self._loop = loop
        self._give_up = give_up
        self._problem = ""  # the server's thread sets it before it writes to the eventfd
        self._problem_fd = -1
        self._server: StoreServer | None = None
        self._listener, self.address = _listen_tcp(host) if host else _listen_unix()
        loop.watch(self._listener.fileno(), Order.NODES, self._serve)
        loop.set_timer(self, time.monotonic_ns() + MOMENT_NS, self._serve)

    def _serve(self) -> None:
        from ronde.stores.server import StoreServer

        self._let_go()
        self._problem_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._loop.watch(self._problem_fd, Order.NODES, self._read_problem)
        self._server = StoreServer(
            self.address, self._key, listener=self._listener, give_up=self._report_problem
        )

    def _report_problem(self, problem: str) -> None:
        self._problem = problem
        os.eventfd_write(self._problem_fd, 1)

    def _read_problem(self) -> None:
        self._loop.unwatch(self._problem_fd)
        self._give_up(self._problem)

    def _let_go(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._loop.set_timer(self, None, self._serve)

    def close(self) -> None:
        """End the store; its content is lost."""
        if self._server:
            self._server.close()
            self._loop.unwatch(self._problem_fd)
            os.close(self._problem_fd)
        else:
            self._let_go()
            self._listener.close()


def _listen_unix() -> tuple[socket.socket, str]:
    name = f"@ronde-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name[1:])
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener, f"unix:{name}"


def _listen_tcp(host: str) -> tuple[socket.socket, str]:
    from ronde.net.addresses import Address, listen

    listener, address = listen(Address(host=host), BACKLOG)
    return listener, str(address)
