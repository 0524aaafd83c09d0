"""The store of a job that its driver serves, in which the agents meet, and the addresses by which they reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.clusters.ssh import is_here
from ronde.launch.config import LaunchConfig
from ronde.net.addresses import address_of_interface, address_towards, addresses_here
from ronde.stores.server import StoreServer

__all__ = ["reachable_addresses", "reachable_by_tasks", "serve_store", "tcp_addresses"]

SOMEWHERE_ELSE = "192.0.2.1"  # reserved (RFC 5737): finding the route there sends nothing
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("::", "0.0.0.0")


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
    *others, last = listening
    for address in others:
        with contextlib.suppress(UsageError):  # this machine has no IPv6
            return StoreServer(_tcp(address, str(port)), key, is_secret=is_secret)
    return StoreServer(_tcp(last, str(port)), key, is_secret=is_secret)


def tcp_addresses(reachable: Sequence[str], server_address: str) -> tuple[str, ...]:
    """Return the addresses with the port of the server, as clients take them."""
    port = server_address.rpartition(":")[2]
    return tuple(_tcp(address, port) for address in reachable)


def _towards_others(config: LaunchConfig, own_addresses: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the address by which other hosts probably reach this one, if there is one."""
    names = [name.rpartition("@")[2] for name in others if not is_here(name, list(own_addresses))]
    for name in (*names[:1], SOMEWHERE_ELSE):
        with contextlib.suppress(UsageError):
            return [address_towards(name, config.start_timeout_ns)]
    return []


def _tcp(host: str, port: str) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
