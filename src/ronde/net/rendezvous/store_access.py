"""The ways to a store where nodes meet: one that a node serves, a file, an etcd."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ronde.core.rendezvous.membership import Node
from ronde.core.rendezvous.quorum import count_missing
from ronde.errors import PeerLostError, ProtocolError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net.addresses import Address, is_loopback, is_ours, parse_address, parse_tcp, resolve
from ronde.net.rendezvous.config import RendezvousConfig
from ronde.net.rendezvous.over_store import FoundStore, OverStore
from ronde.net.rendezvous.probes import MAX_PROBES, PROBE_NS, ProbeListener, ProbeResult, probe, probe_all
from ronde.net.rendezvous.store_session import MOVED
from ronde.net.stores.base import Store
from ronde.net.stores.prefix import PrefixStore

if TYPE_CHECKING:
    from ronde.net.stores.server import StoreServer
    from ronde.net.stores.tcp import StoreClient

__all__ = ["DEFAULT_PORT", "endpoint_of", "make_etcd", "make_file", "make_static", "make_tcp"]

DEFAULT_PORT = 29400
LINGER_NS = 2 * 10**9
SECOND = 10**9
RECONNECT_NS = 10 * SECOND  # how long to look for a store that was lost when no others are known
SEARCH_NS = 60 * SECOND  # and when they are: so long may all connections between the nodes be away
# After which it is looked for elsewhere; by then its end of the connection has broken too.
SILENT_NS = 6 * SECOND
ENTER_NS = (
    6 * SECOND
)  # at another node's open result, where thousands may have come at once: nobody goes back
NOT_OURS = (
    TimeoutError,
    PeerLostError,
    ProtocolError,
)  # behind an open result; another job may have the port now
PROBE_AGAIN_S, AT_LEAST_EVERY_S = 0.02, 0.5  # at first, and in the long run: all nodes of the job do so
# At first, and in the long run: one node of the job does so, and who comes back waits for it.
PROBE_ENDPOINT_S, SELDOM_S = 0.2, 0.5
FIRST_PATIENCE_NS = SECOND // 20
LEAST_LEASE_NS, MOST_LEASE_NS = 2 * SECOND, 5 * SECOND  # etcd gives no shorter one


class TcpStoreAccess:
    """To a store at `address`, which this node serves if it can and should (`serve`; None: if the address is its own).

    If it is lost, the others meet again at the store of the agent of lowest group rank that can be reached, unless that
    is not wanted (`rehost`). One that does not answer may live for others: who may go on says `core/rendezvous/quorum`.
    Raises UsageError if this node should serve and cannot.
    """

    def __init__(self, address: Address, key: JobKey, serve: bool | None, config: RendezvousConfig) -> None:
        self._endpoint = self._address = address  # where nodes begin, and where the store is
        self._key = key
        self._prefix = _prefix(config)
        self._rehost = may_rehost(config)
        self._call_within_s = min(SELDOM_S, config.last_call_ns / 3e9)  # before it begins a job of its own
        self._redirector: _Redirector | None = None
        self._is_closed = False
        self._may_serve = serve or (serve is None and is_this_machine(address.host))
        self._server: StoreServer | None = None  # the store, or where it would be if it is lost
        self._listener = ProbeListener()  # if there will be no server
        if self._may_serve:
            try:
                self._server = _serve_store(str(address), key)
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
            # Who served there when we came has died since.
            if self._may_serve and self._server is None and self._address == self._endpoint:
                self._try_to_serve(self._endpoint)
            raise

    def _try_to_serve(self, address: Address) -> None:
        with suppress(UsageError, OSError):  # then it can only be a guest
            self._server = _serve_store(str(address), self._key)
        if self._is_closed and self._server:  # meanwhile, and the name server took its time
            self._server.close()

    def _client(self, address: str, timeout_ns: int) -> Store:
        from ronde.net.stores.tcp import PATIENCE_NS, StoreClient

        patience_ns = 0 if self._rehost else PATIENCE_NS  # we look for it ourselves
        return PrefixStore(StoreClient(address, self._key, timeout_ns, patience_ns), self._prefix)

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        if not self._rehost:
            return None
        now_ns = began_ns = time.monotonic_ns()
        patience_ns = FIRST_PATIENCE_NS  # the result of a dying process stays open for a moment
        pause_s = PROBE_AGAIN_S
        while go_on() and now_ns - began_ns < (SEARCH_NS if nodes else RECONNECT_NS):
            result = probe(self._address)
            if result is ProbeResult.OPEN:
                with suppress(*NOT_OURS):
                    return FoundStore(self.open_store(patience_ns), (), False)
                patience_ns = min(2 * patience_ns, SILENT_NS)
            is_silent = time.monotonic_ns() - began_ns >= SILENT_NS
            if result is ProbeResult.SHUT or is_silent:
                if found := self._find_other_store(nodes, None if is_silent else were_there, go_on):
                    return found  # else this one may open again: a `ronde store` that is started again
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, AT_LEAST_EVERY_S)
            now_ns = time.monotonic_ns()
        return None

    def _find_other_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> FoundStore | None:
        """Go where the others are if these may be enough. Who has ended counts as that if it was there until now.

        Everybody looks in the same order, so everybody finds the same one.
        """
        sample = _sample(nodes)
        asked = [node for node in sample if node.meeting]
        ours, *others = probe_all([self._address, *(parse_address(node.meeting) for node in asked)])
        if ours is ProbeResult.OPEN:  # by now
            with suppress(*NOT_OURS):
                return FoundStore(self.open_store(PROBE_NS), (), False)
        addresses = dict(zip([node.id for node in asked], others))
        shut = [node for node in asked if addresses[node.id] is ProbeResult.SHUT and were_there is not None]
        known = {str(self._address), self._server.address if self._server else ""}
        unknown = {
            node.id for node in nodes if node.id not in (were_there or ()) and node.meeting not in known
        }
        if 2 * len(unknown) < len(nodes):  # too few to have gone on elsewhere before they ended
            unknown.clear()
        gone = {node.id for node in shut if node.id not in unknown}
        open_ones = [node for node in asked if addresses[node.id] is ProbeResult.OPEN]
        if count_missing([node.id for node in sample], gone, [node.id for node in open_ones], True):
            return None
        for node in open_ones:
            address = parse_address(node.meeting)
            if address != self._address and go_on():
                with suppress(*NOT_OURS):
                    store = self._client(node.meeting, ENTER_NS)
                    self._address = address
                    return FoundStore(store, gone, True)
        return None

    def open_store_at(self, address: str) -> Store:
        store = self._client(address, PROBE_NS)
        self._address = parse_address(address)
        return store

    def call_nodes(self, is_here: bool) -> None:
        """Who serves the store tells those who come later, and only know the endpoint."""
        is_here = is_here and self._address != self._endpoint and self.serves_store()
        if self._redirector:
            self._redirector.is_on = is_here
        elif is_here and self._server:
            self._redirector = _Redirector(
                self._endpoint, self._server.address, self._key, self._prefix, self._call_within_s
            )

    def last_refusal(self) -> str:
        return self._server.turned_away if self._server else ""

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
    """Return as many of these as can be asked, spread over all: the first ones may be lost with their rack."""
    count = min(len(nodes), MAX_PROBES)
    return [nodes[place * len(nodes) // count] for place in range(count)]


def _serve_store(address: str, key: JobKey) -> StoreServer:
    from ronde.net.stores.server import StoreServer  # those who only come do not need it

    return StoreServer(address, key)


class _Redirector:
    """When somebody serves a store at `old` again, it says there that the nodes meet at `new`; within `within_s`."""

    def __init__(self, old: Address, new: str, key: JobKey, prefix: str, within_s: float) -> None:
        self._old = old
        self._new = new
        self._key = key
        self._prefix = prefix
        self._within_s = within_s
        self._pause_s = PROBE_ENDPOINT_S
        self.is_on = True
        self._client: StoreClient | None = None  # while it says so
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-rendezvous-redirector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say it no longer."""
        self._is_over.set()
        if client := self._client:
            client.close()  # wakes the thread, also if that store is silent
        self._thread.join(2 * PROBE_NS / 1e9)

    def _run(self) -> None:
        while not self._is_over.wait(self._pause_s):
            self._pause_s = max(PROBE_ENDPOINT_S, min(2 * self._pause_s, self._within_s))
            if self.is_on and probe(self._old) is ProbeResult.OPEN:
                with suppress(RondeError):
                    self._hold_address()

    def _hold_address(self) -> None:
        from ronde.net.stores.tcp import StoreClient

        self._client = StoreClient(str(self._old), self._key, PROBE_NS, patience_ns=0)
        store = PrefixStore(self._client, self._prefix)
        try:
            store.hold(MOVED, self._new.encode())
            self._pause_s = PROBE_ENDPOINT_S  # who is started again is soon there
            while self.is_on and not self._is_over.is_set():
                store.watch({MOVED: self._new.encode()}, PROBE_NS)
        finally:
            self._client = None
            store.close()


class _FixedStoreAccess:
    """What entrances have in common whose store no node serves: there is no other one."""

    def __init__(self) -> None:
        self._listener = ProbeListener()

    def describe_node(self, node: Node) -> Node:
        self._listener.listen_at(node.address)
        return replace(node, meeting=self._listener.address)

    def find_store(
        self, nodes: Sequence[Node], were_there: Collection[str] | None, go_on: Callable[[], bool]
    ) -> None:
        return None

    def call_nodes(self, is_here: bool) -> None:
        pass

    def open_store_at(self, address: str) -> Store:
        raise UsageError(f"nodes do not meet at {address} instead of here")

    def serves_store(self) -> bool:
        return False

    def last_refusal(self) -> str:
        return ""

    def close(self, others: Callable[[int], None]) -> None:
        self._listener.close()


class FileStoreAccess(_FixedStoreAccess):
    """To a store in a file."""

    def __init__(self, path: str, prefix: str) -> None:
        super().__init__()
        self._path = path
        self._prefix = prefix

    def open_store(self, _: int) -> Store:
        from ronde.net.stores.file import FileStore

        return PrefixStore(FileStore(self._path), self._prefix)


class EtcdStoreAccess(_FixedStoreAccess):
    """To a store in an etcd."""

    def __init__(self, config: RendezvousConfig, prefix: str) -> None:
        super().__init__()
        self._config = config
        self._prefix = prefix

    def open_store(self, timeout_ns: int) -> Store:
        from ronde.net.stores.etcd import EtcdStore

        options = self._config.options
        return EtcdStore(
            etcd_endpoint(self._config),
            self._prefix,
            timeout_ns,
            patience_ns=SEARCH_NS,
            lease_ns=min(max(self._config.silence_ns, LEAST_LEASE_NS), MOST_LEASE_NS),
            # The second names are those of torchrun's older rendezvous in an etcd.
            ca_file=options.get("ca_cert") or options.get("cacert", ""),
            certificate_file=options.get("ssl_cert") or options.get("cert", ""),
            key_file=options.get("ssl_cert_key") or options.get("key", ""),
        )


def make_tcp(config: RendezvousConfig, key: JobKey) -> OverStore:
    """Return the rendezvous over a store at host:port, which the node serves whose address it is.

    The option `is_host` says of this node that it serves the store, or that it does not; `rehost=false` that the loss
    of the store is the end of the job.
    """
    access = TcpStoreAccess(endpoint_of(config), key, config.truth("is_host"), config)
    rules = config.rules(rehost=may_rehost(config))
    return OverStore(rules, access, config.node_rank, config.start_timeout_ns)


def make_static(config: RendezvousConfig, key: JobKey) -> OverStore:
    """Return the rendezvous of nodes whose group ranks are given; that of group rank 0 serves the store.

    Workers expect that the port of the endpoint is theirs (MASTER_PORT), so the nodes themselves meet at another one.
    """
    if not 0 <= config.node_rank < config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs --node-rank from 0 to {config.max_nodes - 1}, not {config.node_rank}"
        )
    if config.min_nodes != config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs a fixed number of nodes, not {config.min_nodes} to {config.max_nodes}"
        )
    endpoint = endpoint_of(config)
    ours = replace(endpoint, port=_meeting_port(endpoint.port))
    try:
        access = TcpStoreAccess(ours, key, config.node_rank == 0, config)
    except UsageError as error:
        raise UsageError(
            f"{error} (the port at which nodes meet if their workers use port {endpoint.port})"
        ) from None
    rules = config.rules(places_are_given=True, rehost=may_rehost(config))
    return OverStore(rules, access, config.node_rank, config.start_timeout_ns)


def may_rehost(config: RendezvousConfig) -> bool:
    """Return whether nodes that lose the store may meet at another one."""
    return config.max_nodes > 1 and config.truth("rehost") is not False


def make_file(config: RendezvousConfig, _: JobKey) -> OverStore:
    """Return the rendezvous in a file on a file system that all nodes share."""
    if not config.endpoint:
        raise UsageError("the rendezvous 'file' needs the path of a file: --rdzv-endpoint PATH")
    return OverStore(
        config.rules(),
        FileStoreAccess(config.endpoint, _prefix(config)),
        config.node_rank,
        config.start_timeout_ns,
    )


def make_etcd(config: RendezvousConfig, _: JobKey) -> OverStore:
    """Return the rendezvous in an etcd, whose members are at host:port[,host:port...]."""
    if not config.endpoint:
        raise UsageError(
            "the rendezvous 'etcd' needs the address of etcd: --rdzv-endpoint HOST:PORT[,HOST:PORT...]"
        )
    from ronde.net.stores.etcd_gateway import parse_endpoints

    parse_endpoints(etcd_endpoint(config), "", "", "")  # says now what is wrong with it
    return OverStore(
        config.rules(), EtcdStoreAccess(config, _prefix(config)), config.node_rank, config.start_timeout_ns
    )


def etcd_endpoint(config: RendezvousConfig) -> str:
    """Return the endpoint, with the scheme that the option `protocol` says where a place has none."""
    protocol = config.options.get("protocol", "").lower()
    if not protocol:
        return config.endpoint
    if protocol not in ("http", "https"):
        raise UsageError(f"--rdzv-conf protocol={protocol} is invalid: expected http or https")
    places = config.endpoint.split(",")
    return ",".join(place if "//" in place else f"{protocol}://{place}" for place in places)


def _prefix(config: RendezvousConfig) -> str:
    return f"rendezvous/{config.run_id}/"


def _meeting_port(port: int) -> int:
    """Return the port of the nodes for that of their workers.

    Not the next one, because jobs on one machine often have neighbouring ports; and rather below those that systems
    give to outgoing connections.
    """
    return port - 10_000 if port >= 20_000 else port + 10_000


def endpoint_of(config: RendezvousConfig) -> Address:
    """Return the address that the endpoint means. Raises UsageError."""
    text = config.endpoint
    if not text:
        raise UsageError(
            f"the rendezvous {config.backend!r} needs an endpoint: --rdzv-endpoint HOST[:{DEFAULT_PORT}]"
        )
    has_port = text.rpartition(":")[2].isdecimal() and (text.count(":") == 1 or "]:" in text)
    return parse_tcp(text if has_port or ":" in text.strip("[]") else f"{text}:{DEFAULT_PORT}")


def is_this_machine(host: str) -> bool:
    """Return whether the host's name or address means this machine: whether a socket can be bound to it."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        endpoints = resolve(Address(host=host, port=0))
    except OSError:
        return False
    return any(is_loopback(str(endpoint.sockaddr[0])) or is_ours(endpoint) for endpoint in endpoints)
