"""The ways to a store where nodes meet: one that a node serves, a file, an etcd."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from ronde.core.round import Node
from ronde.errors import PeerLostError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, is_loopback, parse, parse_tcp, resolve
from ronde.net.rendezvous.config import RendezvousConfig
from ronde.net.rendezvous.over_store import OverStore
from ronde.net.rendezvous.session import MOVED
from ronde.net.stores.base import Store
from ronde.net.stores.prefix import PrefixStore

if TYPE_CHECKING:
    from ronde.net.stores.server import StoreServer

__all__ = ["DEFAULT_PORT", "make_etcd", "make_file", "make_static", "make_tcp"]

DEFAULT_PORT = 29400
LINGER_NS = 2 * 10**9
SECOND = 10**9
RECONNECT_NS = 10 * SECOND  # how long to look for a store that was lost
KNOCK_NS = SECOND
KNOCK_AGAIN_S = 0.02
KNOCK_AT_ENDPOINT_S = 0.2
FIRST_PATIENCE_NS = SECOND // 20
LEAST_LEASE_NS, MOST_LEASE_NS = 2 * SECOND, 5 * SECOND  # etcd gives no shorter one


class TcpEntrance:
    """To a store at `address`, which this node serves if it can and should (`serve`; None: if the address is its own).

    If the process that serves it dies, the others meet again at the store of the agent of lowest group rank that lives,
    unless that is not wanted (`rehost`). One that cannot be reached may live for others: that is a loss.
    Raises UsageError if this node should serve and cannot.
    """

    def __init__(self, address: Address, key: JobKey, serve: bool | None, config: RendezvousConfig) -> None:
        self._endpoint = self._address = address  # where nodes begin, and where the store is
        self._key = key
        self._prefix = _prefix(config)
        self._rehost = config.max_nodes > 1 and config.truth("rehost") is not False
        self._signpost: _Signpost | None = None
        self._server: StoreServer | None = None  # the store, or where it would be if it is lost
        if serve or (serve is None and is_ours(address.host)):
            try:
                self._server = _serve(str(address), key)
            except UsageError:
                if serve:
                    raise

    def offer(self, node: Node) -> Node:
        if self._rehost and self._server is None:
            with suppress(UsageError):  # then it can only be a guest
                self._server = _serve(str(Address(host=node.address)), self._key)
        return replace(node, meeting=self._server.address) if self._server else node

    def enter(self, timeout_ns: int) -> Store:
        return self._client(str(self._address), timeout_ns)

    def _client(self, address: str, timeout_ns: int) -> Store:
        from ronde.net.stores.tcp import PATIENCE_NS, StoreClient

        patience_ns = 0 if self._rehost else PATIENCE_NS  # we look for it ourselves
        return PrefixStore(StoreClient(address, self._key, timeout_ns, patience_ns), self._prefix)

    def enter_again(
        self, nodes: Sequence[Node], go_on: Callable[[], bool]
    ) -> tuple[Store, Collection[str]] | None:
        if not self._rehost:
            return None
        deadline_ns = time.monotonic_ns() + RECONNECT_NS
        patience_ns = FIRST_PATIENCE_NS  # the door of a dying process stays open for a moment
        while go_on() and time.monotonic_ns() < deadline_ns:
            answer = _knock(self._address)
            if answer is _Door.SHUT:
                return self._enter_another(nodes, go_on)
            if answer is _Door.OPEN:
                with suppress(TimeoutError, PeerLostError):
                    return self.enter(patience_ns), ()
                patience_ns *= 2
            time.sleep(KNOCK_AGAIN_S)
        return None

    def _enter_another(
        self, nodes: Sequence[Node], go_on: Callable[[], bool]
    ) -> tuple[Store, Collection[str]] | None:
        """Everybody looks in the same order, so everybody finds the same one."""
        gone: set[str] = set()
        for node in nodes:
            address = parse(node.meeting) if node.meeting and go_on() else None
            answer = _knock(address) if address else _Door.SILENT
            if address and answer is _Door.OPEN:
                with suppress(TimeoutError, PeerLostError):
                    store = self._client(node.meeting, KNOCK_NS)
                    self._move_to(address)
                    return store, gone
            elif answer is _Door.SHUT:
                gone.add(node.id)
        return None

    def enter_other(self, address: str) -> Store:
        store = self._client(address, KNOCK_NS)
        self._move_to(parse(address))
        return store

    def _move_to(self, address: Address) -> None:
        """The store is there now. Who serves it tells those who come later, and only know the endpoint."""
        self._address = address
        if self._server and self._server.address == str(address) and self._signpost is None:
            self._signpost = _Signpost(self._endpoint, str(address), self._key, self._prefix)

    def serves(self) -> bool:
        return self._server is not None and self._server.address == str(self._address)

    def close(self, others: Callable[[int], None]) -> None:
        if self._signpost:
            self._signpost.close()
        if self._server:
            if self.serves():
                others(LINGER_NS)
            self._server.close()


def _serve(address: str, key: JobKey) -> StoreServer:
    from ronde.net.stores.server import StoreServer  # those who only come do not need it

    return StoreServer(address, key)


class _Signpost:
    """As soon as somebody serves a store at `old` again, it says there that the nodes meet at `new`."""

    def __init__(self, old: Address, new: str, key: JobKey, prefix: str) -> None:
        self._old = old
        self._new = new
        self._key = key
        self._prefix = prefix
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-rendezvous-signpost", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say it no longer."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(KNOCK_AT_ENDPOINT_S):
            if _knock(self._old) is _Door.OPEN:
                with suppress(RondeError):
                    self._say()

    def _say(self) -> None:
        from ronde.net.stores.tcp import StoreClient

        store = PrefixStore(StoreClient(str(self._old), self._key, KNOCK_NS, patience_ns=0), self._prefix)
        try:
            store.hold(MOVED, self._new.encode())
            while not self._is_over.is_set():
                store.watch({MOVED: self._new.encode()}, KNOCK_NS)
        finally:
            store.close()


class _Door(Enum):
    """What becomes of a connection attempt."""

    OPEN = auto()
    SHUT = auto()  # its machine says that nobody is there
    SILENT = auto()  # nobody says anything, so nobody knows


def _knock(address: Address) -> _Door:
    answer = _Door.SILENT
    try:
        endpoints = resolve(address)
    except OSError:
        return answer
    for endpoint in endpoints:
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(KNOCK_NS / 1e9)
            try:
                sock.connect(endpoint.sockaddr)
            except (ConnectionRefusedError, FileNotFoundError):
                answer = _Door.SHUT
            except OSError:
                continue
            else:
                return _Door.OPEN
    return answer


class _OnlyPlace:
    """What entrances have in common whose store no node serves: there is no other one."""

    def offer(self, node: Node) -> Node:
        return node

    def enter_again(self, nodes: Sequence[Node], go_on: Callable[[], bool]) -> None:
        return None

    def enter_other(self, address: str) -> Store:
        raise UsageError(f"nodes do not meet at {address} instead of here")

    def serves(self) -> bool:
        return False

    def close(self, others: Callable[[int], None]) -> None:
        pass


class FileEntrance(_OnlyPlace):
    """To a store in a file."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix

    def enter(self, _: int) -> Store:
        from ronde.net.stores.file import FileStore

        return PrefixStore(FileStore(self._path), self._prefix)


class EtcdEntrance(_OnlyPlace):
    """To a store in an etcd."""

    def __init__(self, config: RendezvousConfig, prefix: str) -> None:
        self._config = config
        self._prefix = prefix

    def enter(self, timeout_ns: int) -> Store:
        from ronde.net.stores.etcd import EtcdStore

        options = self._config.options
        silence_ns = self._config.missing_beats * self._config.heartbeat_ns
        return EtcdStore(
            self._config.endpoint,
            self._prefix,
            timeout_ns,
            lease_ns=min(max(silence_ns, LEAST_LEASE_NS), MOST_LEASE_NS),
            ca_file=options.get("ca_cert", ""),
            certificate_file=options.get("ssl_cert", ""),
            key_file=options.get("ssl_cert_key", ""),
        )


def make_tcp(config: RendezvousConfig, key: JobKey) -> OverStore:
    """Return the rendezvous over a store at host:port, which the node serves whose address it is.

    The option `is_host` says of this node that it serves the store, or that it does not; `rehost=false` that the loss
    of the store is the end of the job.
    """
    entrance = TcpEntrance(_address(config), key, config.truth("is_host"), config)
    return OverStore(config.rules(), entrance, config.node_rank, config.start_timeout_ns)


def make_static(config: RendezvousConfig, key: JobKey) -> OverStore:
    """Return the rendezvous of nodes whose group ranks are given; that of group rank 0 serves the store."""
    if not 0 <= config.node_rank < config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs --node-rank from 0 to {config.max_nodes - 1}, not {config.node_rank}"
        )
    if config.min_nodes != config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs a fixed number of nodes, not {config.min_nodes} to {config.max_nodes}"
        )
    entrance = TcpEntrance(_address(config), key, config.node_rank == 0, config)
    return OverStore(config.rules(places_are_given=True), entrance, config.node_rank, config.start_timeout_ns)


def make_file(config: RendezvousConfig, _: JobKey) -> OverStore:
    """Return the rendezvous in a file on a file system that all nodes share."""
    if not config.endpoint:
        raise UsageError("the rendezvous 'file' needs the path of a file: --rdzv-endpoint PATH")
    return OverStore(
        config.rules(),
        FileEntrance(config.endpoint, _prefix(config)),
        config.node_rank,
        config.start_timeout_ns,
    )


def make_etcd(config: RendezvousConfig, _: JobKey) -> OverStore:
    """Return the rendezvous in an etcd, whose members are at host:port[,host:port...]."""
    if not config.endpoint:
        raise UsageError(
            "the rendezvous 'etcd' needs where etcd is: --rdzv-endpoint HOST:PORT[,HOST:PORT...]"
        )
    from ronde.net.stores.etcd_gateway import parse_endpoints

    parse_endpoints(config.endpoint, "", "", "")  # says now what is wrong with it
    return OverStore(
        config.rules(), EtcdEntrance(config, _prefix(config)), config.node_rank, config.start_timeout_ns
    )


def _prefix(config: RendezvousConfig) -> str:
    return f"rendezvous/{config.run_id}/"


def _address(config: RendezvousConfig) -> Address:
    text = config.endpoint
    if not text:
        raise UsageError(
            f"the rendezvous {config.backend!r} needs where to meet: --rdzv-endpoint HOST[:{DEFAULT_PORT}]"
        )
    has_port = text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]:" in text)
    return parse_tcp(text if has_port or ":" in text.strip("[]") else f"{text}:{DEFAULT_PORT}")


def is_ours(host: str) -> bool:
    """Return whether the host's name or address means this machine: whether a socket can be bound to it."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        endpoints = resolve(Address(host=host, port=0))
    except OSError:
        return False
    for endpoint in endpoints:
        if is_loopback(str(endpoint.sockaddr[0])):
            return True
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(endpoint.sockaddr)
            except OSError:
                continue
        return True
    return False
