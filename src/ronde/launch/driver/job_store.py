"""The store of a job that its driver serves: the addresses by which it is reached, and what passes through it.

Agents meet in the store. A function gets to them and its results come back by it. Workers reach it, too, to leave what
outlives their job.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

from ronde.environment import environment
from ronde.errors import RondeError, UsageError
from ronde.job_key import JobKey
from ronde.launch.calls import CallFiles
from ronde.launch.config import LaunchConfig
from ronde.launch.hosts.ssh import is_here
from ronde.net.addresses import OUTSIDE, address_of_interface, address_towards, addresses_here
from ronde.stores.server import StoreServer
from ronde.stores.store import Store, delete_large, get_large, put_large
from ronde.stores.tcp import StoreClient

if TYPE_CHECKING:
    from ronde.launch.agent.agent import RunResult

__all__ = [
    "DRIVER_STORE",
    "JobMemory",
    "call_of_job",
    "connect_to_driver",
    "fetch_result",
    "first_that_listens",
    "offer_call",
    "open_store",
    "reachable_addresses",
    "reachable_by_tasks",
    "send_results",
    "serve_store",
    "tcp_addresses",
]

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("::", "0.0.0.0")
DRIVER_STORE = "RONDE_DRIVER_STORE"  # for workers: where the agent has reached the store
CALL = "call"
CONNECT_NS = 10 * 10**9  # for the driver to reach its own store
SPOOLED_BYTES = 64 << 20  # larger results wait in a file

Listening = TypeVar("Listening")


def reachable_addresses(
    config: LaunchConfig, own_addresses: Sequence[str], others: Sequence[str]
) -> tuple[list[str], Sequence[str]]:
    """Return the addresses by which agents may reach this machine, and those at which to listen, any that works.

    The likely ones come first. This machine listens on the interface that the user names, else on all, because each
    host may use another one. `others`: the names of hosts that only ssh may know. Raises UsageError if no address
    leads here.
    """
    if given := config.interface or config.local_addr:
        reachable = [address_of_interface(given)]
        return reachable, reachable
    reachable = list(dict.fromkeys([*_towards_others(config, own_addresses, others), *own_addresses]))
    if not reachable:
        raise UsageError("this machine has no network interface by which other hosts could reach it")
    return reachable, EVERYWHERE


def reachable_by_tasks(config: LaunchConfig, advertised: str = "") -> tuple[list[str], Sequence[str]]:
    """Return the addresses as `reachable_addresses`, for tasks of a cluster.

    This machine need not have the interface of the hosts. Without a network, the cluster is this machine. `advertised`:
    an address by which tasks come, perhaps through a NAT, which then is the first; a name counts, too.
    """
    try:
        if config.interface:
            address_of_interface(config.interface)
    except UsageError:
        config = replace(config, interface=None)
    reachable, listening = reachable_addresses(config, addresses_here() or [LOOPBACK], ())
    return list(dict.fromkeys([*filter(None, [advertised]), *reachable])), listening


def serve_store(
    listening: Sequence[str], key: JobKey, is_secret: bool | None = None, port: int = 0
) -> StoreServer:
    """Serve a store at the first of these addresses that this machine has.

    `is_secret`: as of `StoreServer`. `port`: 0 for any.
    """
    return first_that_listens(
        listening, lambda host: StoreServer(_tcp(host, str(port)), key, is_secret=is_secret)
    )


def first_that_listens(listening: Sequence[str], listen: Callable[[str], Listening]) -> Listening:
    """Return the result of `listen` for the first of these addresses that this machine has: it may have no IPv6.

    Raises UsageError, that of the last address, if it has none.
    """
    *others, last = listening
    for host in others:
        with contextlib.suppress(UsageError):
            return listen(host)
    return listen(last)


def open_store(
    reachable: Sequence[str],
    listening: Sequence[str],
    key: JobKey,
    stack: ExitStack,
    is_secret: bool | None = None,
    port: int = 0,
) -> tuple[StoreClient, tuple[str, ...]]:
    """Serve a store until the stack closes; return the driver's client of it, and its addresses for agents."""
    server = serve_store(listening, key, is_secret, port)
    stack.callback(server.close)
    client = StoreClient(server.address, key, CONNECT_NS, is_secret=is_secret)
    stack.callback(client.close)
    return client, tcp_addresses(reachable, server.address)


def tcp_addresses(reachable: Sequence[str], server_address: str) -> tuple[str, ...]:
    """Return the addresses with the port of the server, as clients take them."""
    port = server_address.rpartition(":")[2]
    return tuple(_tcp(address, port) for address in reachable)


def _towards_others(config: LaunchConfig, own_addresses: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the address by which other hosts probably reach this one, if there is one."""
    names = [name.rpartition("@")[2] for name in others if not is_here(name, list(own_addresses))]
    for name in (*names[:1], OUTSIDE):
        with contextlib.suppress(UsageError):
            return [address_towards(name, config.start_timeout_ns)]
    return []


def _tcp(host: str, port: str) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


class JobMemory(Protocol):
    """Values that outlive a job, in the memory of the driver."""

    def offer_to(self, store: Store) -> None:
        """Write the values into the store of a job that begins."""

    def collect_from(self, store: Store) -> None:
        """Read the values from the store of a job that has failed. Its workers have ended at any moment."""


def connect_to_driver(timeout_ns: int) -> StoreClient:
    """Return the store of this worker's job.

    Raises UsageError outside of a cluster's job, TimeoutError if the driver does not answer in time.
    """
    variables = environment()
    try:
        address, key = variables[DRIVER_STORE], JobKey.from_hex(variables["RONDE_JOB_KEY"])
    except KeyError as error:
        raise UsageError(
            f"there is no driver, because {error} is not set: run in a task of a cluster"
        ) from None
    return StoreClient(address, key, timeout_ns)


def offer_call(store: Store, packed: bytes) -> None:
    """Write the call (`calls.pack_call`) into the store."""
    put_large(store, CALL, packed)


def call_of_job(store: Store, timeout_ns: int) -> Iterator[bytes]:
    """Return the call in pieces."""
    return get_large(store, CALL, timeout_ns)


def send_results(store: Store, files: CallFiles, result: RunResult) -> None:
    """Write what the workers of this agent have left: results, or the exceptions of those that failed."""
    for worker, rank in enumerate(sorted(result.returncodes)):
        if result.exit_code == 0 or rank in result.failures:
            with files.open_result(worker) as file:
                put_large(store, _result(rank), file)


def fetch_result(store: Store, rank: int) -> BinaryIO | None:
    """Return the file with the result of a rank, as `calls` reads it, and delete it in the store; None without one."""
    try:
        pieces = get_large(store, _result(rank), 0)
        file = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115
        file.writelines(pieces)
    except RondeError:
        return None
    delete_large(store, _result(rank))
    file.seek(0)
    return file  # type: ignore[return-value]


def _result(rank: int) -> str:
    return f"results/{rank}"
