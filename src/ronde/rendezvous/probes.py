"""Probes of agents' listeners: whether a process has ended, answers, or is silent.

Only a refusal is certain: the machine reports that no process listens there. A connection that opens may be that of a
stopped process, and silence may be due to a broken network anywhere.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Enum, auto

from ronde.errors import UsageError
from ronde.net.addresses import Address, listen, parse_address, resolve_all

__all__ = ["PROBE_NS", "MAX_PROBES", "ProbeResult", "ProbeListener", "find_ended", "probe", "probe_all"]

PROBE_NS = 10**9
MAX_PROBES = 64  # at once
BACKLOG = 128  # the backlog of a listener that accepts none
FIRST_PAUSE_S = 0.01
NAMES_NS = PROBE_NS // 2  # the share of a probe for name resolution
# For example on a machine without IPv6.
UNREACHABLE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class ProbeResult(Enum):
    """The result of a connection attempt."""

    OPEN = auto()
    SILENT = auto()  # no answer: inconclusive
    SHUT = auto()  # the machine reports that no process listens there


class ProbeListener:
    """A listening socket that shows other nodes whether this process has ended. It accepts no connections."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.address = ""  # of the socket; empty before `listen_at`, or if the socket cannot be opened

    def listen_at(self, host: str) -> None:
        """Listen at any free port of this address; a second call does nothing."""
        if self._socket is None:
            with suppress(UsageError, OSError):  # then the others wait for the end of this node's lease
                self._socket, address = listen(Address(host=host), backlog=BACKLOG)
                self.address = str(address)
        if self._is_closed:  # meanwhile, by another thread
            self.close()

    def close(self) -> None:
        """Close the socket, which shows that this process has no workers any more."""
        self._is_closed = True
        if self._socket:
            self._socket.close()


def find_ended(addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes whose machines report that their agents have ended; `addresses`: where they listen, by node.

    A process that ends closes its connections before its listener, so open listeners are probed again for a second.
    """
    ended: list[str] = []
    left = list(addresses)
    deadline_ns, pause_s = time.monotonic_ns() + PROBE_NS, FIRST_PAUSE_S
    while True:
        are_open: list[str] = []
        for first in range(0, len(left), MAX_PROBES):
            some = left[first : first + MAX_PROBES]
            answers = dict(zip(some, probe_all([parse_address(addresses[node]) for node in some])))
            ended += [node for node, result in answers.items() if result is ProbeResult.SHUT]
            are_open += [node for node, result in answers.items() if result is ProbeResult.OPEN]
        if not are_open or time.monotonic_ns() >= deadline_ns:
            return tuple(ended)
        left = are_open
        time.sleep(pause_s)
        pause_s *= 2


def probe(address: Address) -> ProbeResult:
    """Return the result of connecting there, after a second at most."""
    return probe_all([address])[0]


def probe_all(addresses: Sequence[Address]) -> list[ProbeResult]:
    """Return the results of connecting to each address, all at once, after a second at most."""
    answers: list[list[ProbeResult]] = [[] for _ in addresses]
    with ExitStack() as stack:
        poll = select.poll()
        waiting: dict[int, tuple[int, socket.socket]] = {}
        deadline_ns = time.monotonic_ns() + PROBE_NS
        for index, endpoints in enumerate(resolve_all(addresses, NAMES_NS)):
            for endpoint in endpoints:
                try:
                    sock = stack.enter_context(socket.socket(endpoint.family, socket.SOCK_STREAM))
                    sock.setblocking(False)
                    error = sock.connect_ex(endpoint.sockaddr)
                except OSError as failure:  # no descriptor is left, or the machine has no IPv6
                    error = failure.errno or errno.EIO
                if error == errno.EINPROGRESS:
                    waiting[sock.fileno()] = index, sock
                    poll.register(sock, select.POLLOUT)
                elif error not in UNREACHABLE:
                    answers[index].append(_result_of(error))
        while waiting and (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            for fd, _ in poll.poll(left_ns / 1e6):
                index, sock = waiting.pop(fd)
                poll.unregister(fd)
                answers[index].append(_result_of(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
        for index, _ in waiting.values():
            answers[index].append(ProbeResult.SILENT)
    return [_combine(each) for each in answers]


def _result_of(error: int) -> ProbeResult:
    if error == 0:
        return ProbeResult.OPEN
    return ProbeResult.SHUT if error in (errno.ECONNREFUSED, errno.ENOENT) else ProbeResult.SILENT


def _combine(answers: Sequence[ProbeResult]) -> ProbeResult:
    """Return the result for a name with several addresses: it is shut only if none of them is silent."""
    return next((result for result in ProbeResult if result in answers), ProbeResult.SILENT)
