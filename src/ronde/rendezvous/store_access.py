"""Access to the stores where nodes meet: a store that a node serves, a file, an etcd."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

from ronde.errors import PeerLostError, ProtocolError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, is_loopback, is_ours, parse_address, parse_tcp, resolve
from ronde.rendezvous.membership import Node
from ronde.rendezvous.probes import MAX_PROBES, PROBE_NS, ProbeListener, ProbeResult, probe, probe_all
from ronde.rendezvous.quorum import count_missing
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.rendezvous.store_session import MOVED_KEY
from ronde.stores.etcd import EtcdStore
from ronde.stores.file import FileStore
from ronde.stores.prefix import PrefixStore
from ronde.stores.server import StoreServer
from ronde.stores.store import Store
from ronde.stores.tcp import PATIENCE_NS, StoreClient

__all__ = [
    "DEFAULT_PORT",
    "FixedStoreAccess",
    "FoundStore",
    "StoreAccess",
    "TcpStoreAccess",
    "endpoint_of",
    "etcd_endpoint",
    "may_rehost",
    "open_etcd_store",
    "open_file_store",
]

DEFAULT_PORT = 29400
LINGER_NS = 2 * 10**9
SECOND = 10**9
RECONNECT_NS = 10 * SECOND  # how long to search for a lost store when no other nodes are known
SEARCH_NS = 60 * SECOND  # and when they are: how long all connections between the nodes may be down
# How long a store may be silent before the search elsewhere; by then the connection has broken at both ends.
SILENT_NS = 6 * SECOND
ENTER_NS = 6 * SECOND  # for connecting to another node's store, where thousands of nodes may arrive at once
# From an open port that another job may have now.
FOREIGN_STORE_ERRORS = (TimeoutError, PeerLostError, ProtocolError)
FIRST_PROBE_PAUSE_S, LONGEST_PROBE_PAUSE_S = 0.02, 0.5  # all nodes of the job probe the lost store
# One node of the job probes the old endpoint, and newcomers wait for it.
FIRST_ENDPOINT_PAUSE_S, LONGEST_ENDPOINT_PAUSE_S = 0.2, 0.5
FIRST_PATIENCE_NS = SECOND // 20
LEAST_LEASE_NS, MOST_LEASE_NS = 2 * SECOND, 5 * SECOND  # etcd grants no shorter one


class FoundStore(NamedTuple):
    """The result of a search. `gone`: the ids of nodes that died with the last store; `is_elsewhere`: another store."""

    store: Store
    gone: Collection[str]
    is_elsewhere: bool


class StoreAccess(Protocol):
    """How to reach the store of a backend."""

    def open_store(self, timeout_ns: int) -> Store:
        """Return a client. Raises TimeoutError if there is no store yet, other errors if there never will be."""

    def describe_node(self, node: Node) -> Node:
        """Return the node's description with `meeting`: where its agent listens, and may serve another store."""

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        """Return a client of the lost store or of the one that replaces it; None if there is none, or `go_on` is false.

        Called in a separate thread. `nodes`: of the last round. `were_there`: the ids of those that were at the store
        until its end showed; None if it is only silent.
        """

    def redirect_nodes(self, is_here: bool) -> None:
        """Redirect nodes at the old address to this store if the job surely goes on here (`is_here`), else stop it."""

    def open_store_at(self, address: str) -> Store:
        """Return a client of the store to which this node is redirected. Raises as `open_store`."""

    def serves_store(self) -> bool:
        """Return whether this node serves the store."""

    def last_refusal(self) -> str:
        """Return a description of the last connection that the store served here has refused, or ""."""

    def close(self, others: Callable[[int], None]) -> None:
        """Stop serving. `others(timeout_ns)` waits until the other nodes are gone."""


class TcpStoreAccess:
    """Access to a store at `address`, which this node serves if `serve` is true; None: if it can.

    If the store is lost, the nodes meet again at the store of the reachable agent with the lowest group rank, unless
    `rehost` is off. A store that is silent for this node may answer others: `rendezvous/quorum` decides which
    nodes may go on. Raises UsageError if this node must serve and cannot.
    """

    def __init__(self, address: Address, key: JobKey, serve: bool | None, config: RendezvousConfig) -> None:
        self._endpoint = self._address = address  # where the nodes first meet, and where the store is now
        self._key = key
        self._prefix = _key_prefix(config)
        self._rehost = may_rehost(config)
        # Soon enough that no node there begins another job.
        self._redirect_within_s = min(LONGEST_ENDPOINT_PAUSE_S, config.last_call_ns / 3e9)
        self._redirector: _Redirector | None = None
        self._is_closed = False
        self._may_serve = serve or (serve is None and is_this_machine(address.host))
        self._server: StoreServer | None = None  # the store, or the one to meet at if the store is lost
        self._listener = ProbeListener()  # without a server
        if self._may_serve:
            try:
                self._server = StoreServer(str(address), key)
            except UsageError:
                if serve:
                    raise

    def describe_node(self, node: Node) -> Node:
        if self._rehost and self._server is None:
            self._try_to_serve(Address(host=node.address))
        elif self._server is None:
            self._listener.listen_at(node.address)
        return replace(node, meeting=self._server.address if self._server else self._listener.address)

    def open_store(self, timeout_ns: int) -> Store:
        try:
            return self._client(str(self._address), timeout_ns)
        except TimeoutError:
            # The node that served there has died since this one started.
            if self._may_serve and self._server is None and self._address == self._endpoint:
                self._try_to_serve(self._endpoint)
            raise

    def _try_to_serve(self, address: Address) -> None:
        with suppress(UsageError, OSError):  # then this node serves no store
            self._server = StoreServer(str(address), self._key)
        if self._is_closed and self._server:  # closed while the name server took its time
            self._server.close()

    def _client(self, address: str, timeout_ns: int) -> Store:
        patience_ns = 0 if self._rehost else PATIENCE_NS  # with `rehost`, `find_store` searches
        return PrefixStore(StoreClient(address, self._key, timeout_ns, patience_ns), self._prefix)

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        if not self._rehost:
            return None
        now_ns = began_ns = time.monotonic_ns()
        patience_ns = FIRST_PATIENCE_NS  # the listener of a dying process stays open for a moment
        pause_s = FIRST_PROBE_PAUSE_S
        while go_on() and now_ns - began_ns < (SEARCH_NS if nodes else RECONNECT_NS):
            result = probe(self._address)
            if result is ProbeResult.OPEN:
                with suppress(*FOREIGN_STORE_ERRORS):
                    return FoundStore(self.open_store(patience_ns), (), False)
                patience_ns = min(2 * patience_ns, SILENT_NS)
            is_silent = time.monotonic_ns() - began_ns >= SILENT_NS
            if result is ProbeResult.SHUT or is_silent:
                if found := self._find_other_store(nodes, None if is_silent else were_there, go_on):
                    return found  # else this store may come back: a `ronde store` that is started again
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PROBE_PAUSE_S)
            now_ns = time.monotonic_ns()
        return None

    def _find_other_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        """Return the first reachable store of another node if the reachable nodes may be a quorum.

        A node that has ended counts as ended if it was at the last store until now. All nodes search in the same order,
        so all find the same store.
        """
        sample = _sample(nodes)
        asked = [node for node in sample if node.meeting]
        ours, *others = probe_all([self._address, *(parse_address(node.meeting) for node in asked)])
        if ours is ProbeResult.OPEN:  # the lost store is back
            with suppress(*FOREIGN_STORE_ERRORS):
                return FoundStore(self.open_store(PROBE_NS), (), False)
        addresses = dict(zip([node.id for node in asked], others))
        shut = [node for node in asked if addresses[node.id] is ProbeResult.SHUT and were_there is not None]
        known = {str(self._address), self._server.address if self._server else ""}
        unknown = {
            node.id for node in nodes if node.id not in (were_there or ()) and node.meeting not in known
        }
        if 2 * len(unknown) < len(nodes):  # too few to have gone on elsewhere
            unknown.clear()
        gone = {node.id for node in shut if node.id not in unknown}
        open_ones = [node for node in asked if addresses[node.id] is ProbeResult.OPEN]
        if count_missing([node.id for node in sample], gone, [node.id for node in open_ones], True):
            return None
        for node in open_ones:
            address = parse_address(node.meeting)
            if address != self._address and go_on():
                with suppress(*FOREIGN_STORE_ERRORS):
                    store = self._client(node.meeting, ENTER_NS)
                    self._address = address
                    return FoundStore(store, gone, True)
        return None

    def open_store_at(self, address: str) -> Store:
        store = self._client(address, PROBE_NS)
        self._address = parse_address(address)
        return store

    def redirect_nodes(self, is_here: bool) -> None:
        """The node that serves the store redirects nodes that only know the endpoint."""
        is_here = is_here and self._address != self._endpoint and self.serves_store()
        if self._redirector:
            self._redirector.is_on = is_here
        elif is_here and self._server:
            self._redirector = _Redirector(
                self._endpoint, self._server.address, self._key, self._prefix, self._redirect_within_s
            )

    def last_refusal(self) -> str:
        return self._server.last_refusal if self._server else ""

    def serves_store(self) -> bool:
        return self._server is not None and self._server.address == str(self._address)

    def close(self, others: Callable[[int], None]) -> None:
        if self._redirector:
            self._redirector.close()
        self._is_closed = True
        if self._server:
            if self.serves_store():
                others(LINGER_NS)
            self._server.close()
        self._listener.close()


def _sample(nodes: Sequence[Node]) -> list[Node]:
    """Return as many of the nodes as can be probed, spread over all: the first ones may be lost with their rack."""
    count = min(len(nodes), MAX_PROBES)
    return [nodes[place * len(nodes) // count] for place in range(count)]


class _Redirector:
    """Holds the address `new` as the key `MOVED_KEY` in any store served at `old` again, within `within_s`."""

    def __init__(self, old: Address, new: str, key: JobKey, prefix: str, within_s: float) -> None:
        self._old = old
        self._new = new
        self._key = key
        self._prefix = prefix
        self._within_s = within_s
        self._pause_s = FIRST_ENDPOINT_PAUSE_S
        self.is_on = True
        self._client: StoreClient | None = None  # while it holds the key
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-rendezvous-redirector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop redirecting."""
        self._is_over.set()
        if client := self._client:
            client.close()  # wakes the thread, also if that store is silent
        self._thread.join(2 * PROBE_NS / 1e9)

    def _run(self) -> None:
        while not self._is_over.wait(self._pause_s):
            self._pause_s = max(FIRST_ENDPOINT_PAUSE_S, min(2 * self._pause_s, self._within_s))
            if self.is_on and probe(self._old) is ProbeResult.OPEN:
                with suppress(RondeError):
                    self._hold_address()

    def _hold_address(self) -> None:
        self._client = StoreClient(str(self._old), self._key, PROBE_NS, patience_ns=0)
        store = PrefixStore(self._client, self._prefix)
        try:
            store.hold(MOVED_KEY, self._new.encode())
            self._pause_s = FIRST_ENDPOINT_PAUSE_S  # a store that ends may be started again soon
            while self.is_on and not self._is_over.is_set():
                store.watch({MOVED_KEY: self._new.encode()}, PROBE_NS)
        finally:
            self._client = None
            store.close()


class FixedStoreAccess:
    """Access to a store that no node serves: it has no replacement. `open_client` opens it within a timeout in ns."""

    def __init__(self, open_client: Callable[[int], Store]) -> None:
        self._open_client = open_client
        self._listener = ProbeListener()

    def open_store(self, timeout_ns: int) -> Store:
        return self._open_client(timeout_ns)

    def describe_node(self, node: Node) -> Node:
        self._listener.listen_at(node.address)
        return replace(node, meeting=self._listener.address)

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> None:
        return None

    def redirect_nodes(self, is_here: bool) -> None:
        pass

    def open_store_at(self, address: str) -> Store:
        raise UsageError(f"nodes do not meet at {address} instead of here")

    def serves_store(self) -> bool:
        return False

    def last_refusal(self) -> str:
        return ""

    def close(self, others: Callable[[int], None]) -> None:
        self._listener.close()


def open_file_store(config: RendezvousConfig) -> Store:
    """Return a client of the store in the file at the endpoint."""
    return PrefixStore(FileStore(config.endpoint), _key_prefix(config))


def open_etcd_store(config: RendezvousConfig, timeout_ns: int) -> Store:
    """Return a client of the store in the etcd at the endpoint. Raises as `EtcdStore`."""
    options = config.options
    return EtcdStore(
        etcd_endpoint(config),
        _key_prefix(config),
        timeout_ns,
        patience_ns=SEARCH_NS,
        lease_ns=min(max(config.silence_ns, LEAST_LEASE_NS), MOST_LEASE_NS),
        # The second names are those of torchrun's older etcd rendezvous.
        ca_file=options.get("ca_cert") or options.get("cacert", ""),
        certificate_file=options.get("ssl_cert") or options.get("cert", ""),
        key_file=options.get("ssl_cert_key") or options.get("key", ""),
    )


def may_rehost(config: RendezvousConfig) -> bool:
    """Return whether nodes that lose the store may meet at another one."""
    return config.max_nodes > 1 and config.truth("rehost") is not False


def etcd_endpoint(config: RendezvousConfig) -> str:
    """Return the endpoint, with the scheme of the option `protocol` before addresses without one."""
    protocol = config.options.get("protocol", "").lower()
    if not protocol:
        return config.endpoint
    if protocol not in ("http", "https"):
        raise UsageError(f"--rdzv-conf protocol={protocol} is invalid: expected http or https")
    places = config.endpoint.split(",")
    return ",".join(place if "//" in place else f"{protocol}://{place}" for place in places)


def _key_prefix(config: RendezvousConfig) -> str:
    """Return the prefix of all keys of the job."""
    return f"rendezvous/{config.run_id}/"


def endpoint_of(config: RendezvousConfig) -> Address:
    """Return the address of the endpoint, with the default port if it has none. Raises UsageError."""
    text = config.endpoint
    if not text:
        raise UsageError(
            f"the rendezvous {config.backend!r} needs an endpoint: --rdzv-endpoint HOST[:{DEFAULT_PORT}]"
        )
    has_port = text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]:" in text)
    return parse_tcp(text if has_port or ":" in text.strip("[]") else f"{text}:{DEFAULT_PORT}")


def is_this_machine(host: str) -> bool:
    """Return whether the host name or address is this machine's: whether a socket can be bound to it."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        endpoints = resolve(Address(host=host, port=0))
    except OSError:
        return False
    return any(is_loopback(str(endpoint.sockaddr[0])) or is_ours(endpoint) for endpoint in endpoints)
