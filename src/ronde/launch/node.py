"""What this node says about itself to the others: its address and a port; and the key that all share."""

from __future__ import annotations

from collections.abc import Mapping

from ronde.core.round import Node
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.config import LaunchConfig
from ronde.net.host import host_name
from ronde.net.processes import free_port

__all__ = ["describe_node", "is_guessable", "job_key", "own_address"]

LOOPBACK = "127.0.0.1"
SOMEWHERE_ELSE = "192.0.2.1"  # belongs to nobody (RFC 5737): asking for the way there sends nothing


def job_key(config: LaunchConfig, environment: Mapping[str, str]) -> JobKey:
    """Return the key of the job: a new one for a single node, else the given one, or one that follows from the run id.

    Who guesses the run id can compute the latter: it keeps jobs apart and is no secret.
    """
    if config.rendezvous.max_nodes == 1:
        return JobKey.generate()
    if is_guessable(config, environment):
        return JobKey.derived_from(f"run {config.rendezvous.run_id}")
    given = environment["RONDE_JOB_KEY"]
    try:
        return JobKey.from_hex(given)
    except UsageError as error:
        raise UsageError(f"RONDE_JOB_KEY: {error}") from None


def is_guessable(config: LaunchConfig, environment: Mapping[str, str]) -> bool:
    """Return whether others than this job's nodes can find out its key: it has several, and nobody gave them one."""
    return config.rendezvous.max_nodes > 1 and not environment.get("RONDE_JOB_KEY")


def own_address(config: LaunchConfig) -> str:
    """Return the numeric address by which other nodes reach this one.

    That is what the user says, or else where packets to the rendezvous leave. Raises UsageError if there is none.
    """
    if config.rendezvous.max_nodes == 1:
        return LOOPBACK
    from ronde.net.addresses import address_of_interface, is_loopback

    if config.local_addr:
        return _numeric(config.local_addr)
    if config.interface:
        return address_of_interface(config.interface)
    host = _host_of(config.rendezvous.endpoint)
    towards = _towards(host)
    # A host may know its own name as a loopback address, by which no other host reaches it.
    if is_loopback(towards) and host != "localhost" and host != towards:
        return _towards("")
    return towards


def _host_of(endpoint: str) -> str:
    """Return the host of the first place of an endpoint; nothing if it is a path."""
    first = endpoint.split(",")[0].rpartition("://")[2]
    if "/" in first:
        return ""
    host = first.rpartition(":")[0] or first
    return host.removeprefix("[").removesuffix("]")


def _towards(host: str) -> str:
    from ronde.net.addresses import address_towards

    try:
        return address_towards(host or SOMEWHERE_ELSE)
    except UsageError:
        if host:
            raise
        return LOOPBACK  # there is no network


def _numeric(name: str) -> str:
    from ronde.net.addresses import Address, resolve

    try:
        return str(resolve(Address(host=name))[0].sockaddr[0])
    except OSError as error:
        raise UsageError(
            f"--local-addr {name} cannot be resolved ({error.strerror}): give an address of this machine"
        ) from None


def describe_node(config: LaunchConfig, address: str, store: str, id: str) -> Node:
    """Return what this node says of itself when it joins; the port is free at this moment."""
    return Node(
        id=id,
        host=host_name(),
        address=address,
        slots=config.worker.slots,
        store=store,
        master_port=free_port(address),
        role=config.worker.role,
        wish=config.rendezvous.node_rank,
    )
