"""What can be learned at the result of an agent, without going in: whether its process has ended, is there, or is silent.

Only a refusal is certain: the machine says that nobody listens there. A result that opens may be that of a process which
has stopped, and silence may be a cable that was pulled, anywhere.
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
PROBES = 128  # that wait at a listener which accepts none
FIRST_PAUSE_S = 0.01
NAMES_NS = PROBE_NS // 2  # of it, for a name server
NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # this machine does not speak IPv6, say


class ProbeResult(Enum):
    """What becomes of a connection attempt."""

    OPEN = auto()
    SILENT = auto()  # nobody says anything, so nobody knows
    SHUT = auto()  # its machine says that nobody is there


class ProbeListener:
    """A listening socket by which other nodes can find out whether this process has ended. It accepts nobody."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.address = ""  # where it listens; empty before `listen_at`, or if it cannot listen there

    def listen_at(self, host: str) -> None:
        """Listen at any free port of this address; a second call does nothing."""
        if self._socket is None:
            with suppress(UsageError, OSError):  # then the others wait for our lease
                self._socket, address = listen(Address(host=host), backlog=PROBES)
                self.address = str(address)
        if self._is_closed:  # meanwhile
            self.close()

    def close(self) -> None:
        """Show that this process has ended, or has no workers any more."""
        self._is_closed = True
        if self._socket:
            self._socket.close()


def find_ended(addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return those nodes whose machines say that their agents have ended; `addresses`: where they listen, by node.

    A process that ends closes its connections before its listener, so one that answers is probed again for a second.
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
    """Return what becomes of connecting there, after a second at most."""
    return probe_all([address])[0]


def probe_all(addresses: Sequence[Address]) -> list[ProbeResult]:
    """Return what becomes of connecting to each of them, all at once, after a second at most."""
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
                except OSError as failure:  # no descriptor is left, or no IPv6 is spoken here at all
                    error = failure.errno or errno.EIO
                if error == errno.EINPROGRESS:
                    waiting[sock.fileno()] = index, sock
                    poll.register(sock, select.POLLOUT)
                elif error not in NO_WAY:
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
    """Of a name with several addresses: it is shut only if none of them is silent."""
    return next((result for result in ProbeResult if result in answers), ProbeResult.SILENT)
