"""The ways to a store where nodes meet: one that a node serves, a file, an etcd."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, is_loopback, parse_tcp, resolve
from ronde.net.rendezvous.config import RendezvousConfig
from ronde.net.rendezvous.over_store import OverStore
from ronde.net.stores.base import Store
from ronde.net.stores.prefix import PrefixStore

__all__ = ["DEFAULT_PORT", "make_etcd", "make_file", "make_static", "make_tcp"]

DEFAULT_PORT = 29400
LINGER_NS = 2 * 10**9
SECOND = 10**9
LEAST_LEASE_NS, MOST_LEASE_NS = 2 * SECOND, 5 * SECOND  # etcd gives no shorter one


class TcpEntrance:
    """To a store at `address`, which this node serves if it can and should (`serve`; None: if the address is its own).

    Raises UsageError if it should and cannot.
    """

    def __init__(self, address: Address, key: JobKey, serve: bool | None, prefix: str) -> None:
        self._address = address
        self._key = key
        self._prefix = prefix
        self._server = None
        if serve or (serve is None and is_ours(address.host)):
            from ronde.net.stores.server import StoreServer

            try:
                self._server = StoreServer(str(address), key)
            except UsageError:
                if serve:
                    raise

    def enter(self, timeout_ns: int) -> Store:
        from ronde.net.stores.tcp import StoreClient

        return PrefixStore(StoreClient(str(self._address), self._key, timeout_ns), self._prefix)

    def close(self, others: Callable[[int], None]) -> None:
        if self._server:
            others(LINGER_NS)
            self._server.close()


class FileEntrance:
    """To a store in a file."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix

    def enter(self, _: int) -> Store:
        from ronde.net.stores.file import FileStore

        return PrefixStore(FileStore(self._path), self._prefix)

    def close(self, others: Callable[[int], None]) -> None:
        pass


class EtcdEntrance:
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

    def close(self, others: Callable[[int], None]) -> None:
        pass


def make_tcp(config: RendezvousConfig, key: JobKey) -> OverStore:
    """Return the rendezvous over a store at host:port, which the node serves whose address it is.

    The option `is_host` says of this node that it serves the store, or that it does not.
    """
    entrance = TcpEntrance(_address(config), key, config.truth("is_host"), _prefix(config))
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
    entrance = TcpEntrance(_address(config), key, config.node_rank == 0, _prefix(config))
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
