"""What a node offers when it joins a round: its addresses, a free port, the user's MASTER_ADDR, and a store.

The store is the one in which the workers of the round meet, if this node has group rank 0. It has an address at once.
The server is loaded when the first worker connects, or shortly after the start: a short job that needs no store does
not wait for one. The key of the job is found here, too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.config import LaunchConfig
from ronde.launch.loop import Loop, Order
from ronde.net.addresses import (
    OUTSIDE,
    Address,
    address_of_interface,
    address_towards,
    everywhere,
    is_loopback,
    is_ours,
    listen,
    resolve,
)
from ronde.net.host import host_identity, host_name
from ronde.net.job_keys import find_job_key
from ronde.process.resources import free_port
from ronde.rendezvous.membership import Node
from ronde.values import FLAG

if TYPE_CHECKING:
    from ronde.stores.server import StoreServer

__all__ = [
    "RoundStore",
    "describe_node",
    "given_master",
    "has_insecure_key",
    "job_key",
    "own_address",
    "require_free_master_port",
]

ALONE = "alone"
SERVED = ("tcp", "c10d", "static")  # a node serves the store at the endpoint
LOOPBACK = "127.0.0.1"
LAST_MOMENTS_NS = 2 * 10**9  # workers of a killed agent may still use the port
LOOK_AGAIN_S = 0.05


def job_key(config: LaunchConfig, environment: Mapping[str, str]) -> JobKey:
    """Return the key of the job: a new one for a single node without a given key, else the one that all nodes share.

    The rendezvous `alone` always gets a new one. Raises UsageError if the nodes have no key to share.
    """
    given, file = environment.get("RONDE_JOB_KEY"), environment.get("RONDE_JOB_KEY_FILE", "")
    if config.rendezvous.backend == ALONE or not (_has_others(config) or given or file):
        return JobKey.generate()
    try:
        key = JobKey.from_hex(given) if given else None
    except UsageError as error:
        raise UsageError(f"RONDE_JOB_KEY: {error}") from None
    return find_job_key(
        f"run {config.rendezvous.run_id}",
        environment,
        key=key,
        descriptor=None,
        file=file,
        is_insecure=has_insecure_key(config, environment),
        is_one_machine=_is_one_machine(config),
    )


def _has_others(config: LaunchConfig) -> bool:
    """Return whether the job may have several nodes, including spares."""
    meeting = config.rendezvous
    return meeting.backend != ALONE and meeting.max_nodes + meeting.spares > 1


def _is_one_machine(config: LaunchConfig) -> bool:
    """Return whether all nodes are on this machine, because they meet at a loopback address."""
    host = _host_of(config.rendezvous.endpoint)
    return config.rendezvous.backend in SERVED and (host == "localhost" or is_loopback(host))


def has_insecure_key(config: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """Return whether the key follows from the job's name, because the user allows it and gives no key."""
    if environment.get("RONDE_JOB_KEY") or environment.get("RONDE_JOB_KEY_FILE") or not _has_others(config):
        return False
    if config.insecure_job_key:
        return True
    text = environment.get("RONDE_INSECURE_JOB_KEY", "").strip()
    return bool(text) and bool(FLAG.read(text, f"RONDE_INSECURE_JOB_KEY={text!r}"))


def own_address(config: LaunchConfig) -> str:
    """Return the numeric address by which other nodes reach this one.

    It is the user's choice, else the address from which packets to the rendezvous leave. Raises UsageError without one.
    """
    if config.rendezvous.max_nodes == 1:
        return LOOPBACK
    if config.local_addr:
        return _numeric(config.local_addr, config.start_timeout_ns)
    if config.interface:
        return address_of_interface(config.interface)
    host = _host_of(config.rendezvous.endpoint)
    towards = _towards(host, config.start_timeout_ns)
    # A host may resolve its own name to a loopback address, at which no other host reaches it.
    if is_loopback(towards) and host != "localhost" and host != towards:
        return _towards("")
    return towards


def _host_of(endpoint: str) -> str:
    """Return the host of the endpoint's first address; empty if the endpoint is a path."""
    first = endpoint.split(",")[0].rpartition("://")[2]
    if "/" in first:
        return ""
    host = first.rpartition(":")[0] or first
    return host.removeprefix("[").removesuffix("]")


def _towards(host: str, within_ns: int | None = None) -> str:
    try:
        return address_towards(host or OUTSIDE, within_ns)
    except UsageError:
        if host:
            raise
        return LOOPBACK  # there is no network


def _numeric(name: str, within_ns: int) -> str:
    try:
        return str(resolve(Address(host=name), within_ns)[0].sockaddr[0])
    except OSError as error:
        raise UsageError(
            f"--local-addr {name} cannot be resolved ({error.strerror}): give an address of this machine"
        ) from None


def describe_node(
    config: LaunchConfig, environment: Mapping[str, str], address: str, store: str, id: str
) -> Node:
    """Return this node as it joins, with a port that is free now. `environment`: the launcher's."""
    variables = {**environment, **config.worker.environment}
    return Node(
        id=id,
        host=host_name(),
        address=address,
        slots=config.worker.slots,
        store=store,
        master_port=free_port(address),
        role=config.worker.role,
        wish=config.rendezvous.node_rank,
        host_id=host_identity(variables.get("RONDE_HOST_ID", "")) if config.shares_hosts else "",
    )


def given_master(config: LaunchConfig) -> tuple[str | None, int | None]:
    """Return the MASTER_ADDR and MASTER_PORT that the user gave; None: the node of rank 0 chooses.

    For the rendezvous `static` they are its endpoint, as in torchrun: node 0 has rank 0 in every round.
    """
    if config.rendezvous.backend != "static":
        return config.master_addr, config.master_port
    from ronde.rendezvous.store_access import endpoint_of  # with the machines of nodes that meet in a store

    address = endpoint_of(config.rendezvous)
    return config.master_addr or address.host, config.master_port or address.port


def require_free_master_port(config: LaunchConfig) -> None:
    """Raise UsageError if the user gives a MASTER_PORT for rank 0 on this node and another process uses it."""
    host, port = given_master(config)
    if port is None or config.rendezvous.node_rank > 0:
        return
    address = Address(host=host or LOOPBACK, port=port)
    try:
        # Behind a NAT or a service, the address may be this node's for others only.
        if not is_ours(resolve(address, config.start_timeout_ns)[0]):
            address = Address(host=everywhere(), port=port)
    except OSError as error:
        raise UsageError(f"cannot find {address.host}: {error.strerror}") from None
    deadline_ns = time.monotonic_ns() + LAST_MOMENTS_NS
    while True:
        try:
            listen(address)[0].close()
        except UsageError:
            if time.monotonic_ns() > deadline_ns:
                raise
            time.sleep(LOOK_AGAIN_S)
        else:
            return


# The store of a round


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

        self._stop_waiting()
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

    def _stop_waiting(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._loop.set_timer(self, None, self._serve)

    def close(self) -> None:
        """End the store; its content is lost."""
        if self._server:
            self._server.close()
            self._loop.unwatch(self._problem_fd)
            os.close(self._problem_fd)
        else:
            self._stop_waiting()
            self._listener.close()


def _listen_unix() -> tuple[socket.socket, str]:
    name = f"@ronde-{os.urandom(8).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name[1:])
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener, f"unix:{name}"


def _listen_tcp(host: str) -> tuple[socket.socket, str]:
    listener, address = listen(Address(host=host), BACKLOG)
    return listener, str(address)
