"""Addresses: as texts, in look-ups of names, of services of this machine, and of its interfaces.

A text is `unix:@name` (abstract), `unix:/path`, `tcp:host:port` or `tcp:[::1]:port`.

getaddrinfo resolves names when a connection is opened or a service is bound. Addresses are never turned back into
names, because a reverse look-up can stall for seconds. A name server may not answer within the caller's time limit, so
threads ask it (`NameResolver`):

1. There is one query at a time for each name. A caller that cannot wait any longer leaves it open, and the next caller
   gets its answer.
2. Until there is a new answer the last one counts: the name server may be lost together with a host that the caller
   now looks for at another address.

`address_towards` chooses the address by which other hosts reach this machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.errors import UsageError
from ronde.net.descriptors import OwnSocket
from ronde.net.unix_peers import process_and_user

__all__ = [
    "LOOPBACK_REMEDY",
    "OUTSIDE",
    "Address",
    "Answer",
    "Endpoint",
    "NameResolver",
    "address_of_interface",
    "address_towards",
    "addresses_here",
    "everywhere",
    "interface_addresses",
    "interface_of",
    "is_loopback",
    "is_ours",
    "listen",
    "parse_address",
    "parse_tcp",
    "resolve",
    "resolve_all",
]

# No machine has this address (RFC 5737), and the default route leads to it. Nothing is sent there.
OUTSIDE = "192.0.2.1"
LOOPBACK_REMEDY = (
    "the loopback interface of this machine or container is down or has no address: "
    "ip link set lo up && ip address add 127.0.0.1/8 dev lo"
)

SIOCGIFADDR = 0x8915
UNIX_PATH_BYTES = 107
_HINTS = {
    errno.EADDRINUSE: "; end the process that uses it or choose another address",
    errno.EADDRNOTAVAIL: "; choose an address of this machine",
    errno.EACCES: "; choose a port above 1023",
}

Answer = Sequence[tuple[Any, ...]]  # of socket.getaddrinfo


@dataclass(frozen=True)
class Address:
    """A Unix socket (`path`; a leading `@` marks an abstract name) or, if `path` is empty, a TCP `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        return self.path != ""

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


@dataclass(frozen=True)
class Endpoint:
    """The arguments of socket calls: the address family, and the address in that family's form."""

    family: socket.AddressFamily
    sockaddr: str | tuple[str, int] | tuple[str, int, int, int]


def parse_address(text: str) -> Address:
    """Return the address that a text denotes. Raises UsageError that shows the valid forms."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith(("@", "/")) and len(rest) > 1:
        if len(rest.encode()) > UNIX_PATH_BYTES or "\0" in rest:
            raise UsageError(
                f"the address {text!r} is too long: a Unix socket has at most {UNIX_PATH_BYTES} bytes"
            )
        return Address(path=rest)
    if scheme == "tcp":
        return parse_tcp(rest)
    raise UsageError(
        f"{text!r} is not an address: write unix:@name, unix:/path, tcp:host:port or tcp:[ipv6]:port"
    )


def parse_tcp(text: str) -> Address:
    """Return the TCP address that `host:port` or `[ipv6]:port` denotes. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != bracketed or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{text!r} is not a TCP address: write host:port or [ipv6]:port, with a port up to 65535"
        )
    return Address(host=host, port=int(port))


# Look-ups of names


class NameResolver:
    """Open queries and known answers. `ask` returns the addresses of a host and port, or raises OSError."""

    def __init__(self, ask: Callable[[str, int], Answer]) -> None:
        self._ask = ask
        self._queries: dict[tuple[str, int], _NameQuery] = {}
        self._known: dict[tuple[str, int], Answer] = {}

    def begin_query(self, host: str, port: int) -> _NameQuery:
        """Return the open query for this name, or begin one."""
        query = self._queries.get((host, port))
        if query is None or query.pid != os.getpid():  # a thread does not survive a fork
            query = self._queries[host, port] = _NameQuery(lambda: self._ask(host, port))
        return query

    def find_addresses(self, host: str, port: int, within_ns: int) -> Answer:
        """Return the addresses after `within_ns` at most. Raises OSError if they are not known by then."""
        name, query = (host, port), self.begin_query(host, port)
        if query.done.wait(max(0, within_ns) / 1e9):
            if self._queries.get(name) is query:
                del self._queries[name]
            if not isinstance(query.answer, OSError):
                self._known[name] = query.answer
            elif name not in self._known or query.answer.errno != socket.EAI_AGAIN:
                raise query.answer.with_traceback(None)
        elif name not in self._known:
            raise OSError(errno.ETIMEDOUT, f"no name server has answered yet where {host} is")
        return self._known[name]


class _NameQuery:
    """A thread that asks, then sets `answer` and `done`."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self.pid = os.getpid()
        self.done = threading.Event()
        self.answer: Answer | OSError = ()
        self._ask = ask
        threading.Thread(target=self._run, name="ronde-names", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except OSError as error:
            self.answer = error
        finally:
            self.done.set()


def resolve(address: Address, within_ns: int | None = None) -> list[Endpoint]:
    """Return the endpoints to try, in order. Raises OSError (socket.gaierror) if the host name is unknown.

    `within_ns` limits the time; without a new answer by then the last one counts.
    """
    if address.is_unix:
        path = "\0" + address.path[1:] if address.path.startswith("@") else address.path
        return [Endpoint(socket.AF_UNIX, path)]
    if within_ns is None or _is_numeric(address.host):
        found: Answer = _query_name_server(address.host, address.port)
    else:
        found = _resolver.find_addresses(address.host, address.port, within_ns)
    return [Endpoint(family, sockaddr) for family, _, _, _, sockaddr in found]


def resolve_all(addresses: Sequence[Address], within_ns: int) -> list[list[Endpoint]]:
    """Return the endpoints of each address, [] for names not resolved in time. All are resolved at once."""
    deadline_ns = time.monotonic_ns() + within_ns
    for address in addresses:
        if not (address.is_unix or _is_numeric(address.host)):
            _resolver.begin_query(address.host, address.port)
    found: list[list[Endpoint]] = []
    for address in addresses:
        try:
            found.append(resolve(address, deadline_ns - time.monotonic_ns()))
        except OSError:
            found.append([])
    return found


def _query_name_server(host: str, port: int) -> Answer:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # for example two consecutive dots
        raise socket.gaierror(socket.EAI_NONAME, "not a valid host name") from None


_resolver = NameResolver(_query_name_server)


# Services of this machine


def listen(address: Address, backlog: int = 4096) -> tuple[socket.socket, Address]:
    """Bind a service; return the listening, non-blocking socket, and the address with its actual port.

    If the host name resolves to an address that others do not reach this machine by (that of a service in front of it,
    or the 127.0.1.1 that some systems give their own name), the socket is bound on all interfaces. Raises UsageError if
    the address is taken or is not this machine's.
    """
    try:
        endpoint = resolve(address)[0]
        if not address.is_unix and address.host != "localhost" and not _is_numeric(address.host):
            endpoint = _reachable_endpoint(endpoint)
        listener = OwnSocket(endpoint.family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"cannot serve at {address}: {error.strerror}") from None
    try:
        if not address.is_unix:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if endpoint.family == socket.AF_INET6:  # :: accepts IPv4, too
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(endpoint.sockaddr)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = _HINTS.get(error.errno or 0, "")
        if address.is_unix and error.errno == errno.EADDRINUSE:
            hint += _describe_holder(endpoint)
        raise UsageError(f"cannot serve at {address}: {error.strerror}{hint}") from None
    if address.is_unix:
        return listener, address
    return listener, Address(host=address.host, port=listener.getsockname()[1])


def _describe_holder(endpoint: Endpoint) -> str:
    """Return a phrase that names the process listening at a Unix socket, or "" if it cannot be found out."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(endpoint.sockaddr)
            process, user = process_and_user(probe)
    except OSError:  # the process does not listen, or its queue is full
        return ""
    return f" (process {process} of user {user} listens there)"


def _is_numeric(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        return False
    return True


def is_ours(endpoint: Endpoint) -> bool:
    """Return whether an interface of this machine has the address."""
    try:
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
            probe.bind((endpoint.sockaddr[0], 0, *endpoint.sockaddr[2:]))
    except OSError:  # also on a machine without IPv6
        return False
    return True


def _reachable_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint, or the wildcard with its port if others do not reach this machine by the endpoint."""
    if not is_loopback(str(endpoint.sockaddr[0])) and is_ours(endpoint):
        return endpoint
    wildcard = "::" if endpoint.family == socket.AF_INET6 else "0.0.0.0"
    return Endpoint(endpoint.family, (wildcard, int(endpoint.sockaddr[1])))


def everywhere() -> str:
    """Return the wildcard address of this machine: `::`, or `0.0.0.0` without IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return "0.0.0.0"
    return "::"


def is_loopback(host: str) -> bool:
    """Return whether a numeric address reaches only the machine itself."""
    return host.startswith("127.") or host == "::1"


# The addresses of this machine


def address_towards(host: str = OUTSIDE, within_ns: int | None = None) -> str:
    """Return the numeric address of this machine from which packets to `host` leave; sends nothing.

    By default it is the address from which packets to other networks leave: the one by which hosts probably reach this
    machine if the name of none of them is known.

    Raises UsageError if the host cannot be resolved within `within_ns`, or no route leads to it.
    """
    try:
        endpoint = resolve(Address(host=host, port=9), within_ns)[0]
    except OSError as error:
        raise UsageError(
            f"the host name {host!r} cannot be resolved ({error.strerror}): correct it, or write an address"
        ) from None
    try:
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
            probe.connect(endpoint.sockaddr)
            return str(probe.getsockname()[0])
    except OSError as error:
        hint = f"; {LOOPBACK_REMEDY}" if is_loopback(str(endpoint.sockaddr[0])) else ""
        raise UsageError(f"no network interface reaches {host}: {error.strerror}{hint}") from None


def address_of_interface(interface: str) -> str:
    """Return the numeric address of an interface given by name (IPv4 first) or by one of its addresses.

    Of several, separated by commas, it is the first that this machine has. Raises UsageError that lists the interfaces
    of this machine.
    """
    names = [name for _, name in socket.if_nameindex()]
    wanted = interface.split(",")
    interface = next((each for each in wanted if each in names or _is_numeric(each)), interface)
    if _is_numeric(interface):
        return interface
    if interface not in names:
        raise UsageError(f"there is no network interface {interface!r} here; there are " + ", ".join(names))
    address = _ipv4_of_interface(interface) or _ipv6_of_interface(interface)
    if address is None:
        raise UsageError(f"the network interface {interface!r} has no address")
    return address


def addresses_here() -> list[str]:
    """Return the numeric addresses of this machine except loopback: one per interface and family, IPv4 first."""
    return [address for _, address in interface_addresses()]


def interface_addresses() -> list[tuple[str, str]]:
    """Return the same addresses, each after the name of its interface."""
    ipv4: list[tuple[str, str]] = []
    ipv6: list[tuple[str, str]] = []
    for _, name in socket.if_nameindex():
        for found, find in ((ipv4, _ipv4_of_interface), (ipv6, _ipv6_of_interface)):
            address = find(name)
            if address is not None and not is_loopback(address):
                found.append((name, address))
    return [*ipv4, *ipv6]


def interface_of(address: str) -> str:
    """Return the name of the interface with this address; empty if it is loopback or not of this machine."""
    return next((name for name, found in interface_addresses() if found == address), "")


def _ipv4_of_interface(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _ipv6_of_interface(interface: str) -> str | None:
    global_scope = "00"
    try:
        with open("/proc/net/if_inet6") as table:
            for line in table:
                digits, _, _, scope, _, name = line.split()
                if name == interface and (scope == global_scope or interface == "lo"):
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    except FileNotFoundError:
        pass
    return None
