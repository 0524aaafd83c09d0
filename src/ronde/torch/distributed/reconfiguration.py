"""Process groups whose members change while their processes go on.

A process that wants to be a member of the next generation of a group tells its *handle* to the program that decides
about that generation: a text that says where to find the process. All members of a generation get the same list of
handles, and connect: they meet at a store that the process with the first handle serves. So no process has to outlive
the others, and torch.distributed's store is not needed.

The members recognise each other by the user's key file or the key that the launcher gave them (`net/job_keys`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from ronde import settings
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.errors import PeerLostError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net import addresses
from ronde.net.host import host_identity
from ronde.net.job_keys import find_job_key
from ronde.settings import Settings, environment
from ronde.stores.prefix import PrefixStore
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient
from ronde.torch.distributed.connection import GroupConnection, connect_alone, connect_world
from ronde.torch.distributed.meeting import address_towards

if TYPE_CHECKING:
    from ronde.torch.distributed.backend import RondeGroup

__all__ = [
    "Generation",
    "Generations",
    "Options",
    "ReconfigureError",
    "get_reconfigure_handle",
    "reconfigure",
]

_ANSWER_NS = 10 * 10**9
_GRACE_NS = 10**9  # beyond the timeout, in which members tell each other that it is over

_JOB = "torch.distributed's reconfigure"  # the same for all groups of a user or launcher: they may be merged


@dataclass(frozen=True)
class Options:
    """Options of a group: `init_process_group("ronde", pg_options=Options(...))`.

    `enable_reconfigure`: the group has no connections until its first `reconfigure`. With PyTorch 2.14 and later
    `init_process_group(..., enable_reconfigure=True)` means the same.
    """

    enable_reconfigure: bool = False


class ReconfigureError(UsageError, RuntimeError):
    """The arguments of `reconfigure` are invalid. The group has not changed.

    It is also a RuntimeError, as other backends of torch.distributed raise.
    """


class Generation(NamedTuple):
    """One generation of a group. `rank`: of this process. `store`: the address of that where its members meet."""

    uuid: int
    rank: int
    size: int
    store: str
    is_one_machine: bool

    @property
    def prefix(self) -> str:
        """The beginning of the keys of its members."""
        return f"{self.uuid}/"


class Generations:
    """How one process takes part in the generations of a group."""

    def __init__(self) -> None:
        self._server: StoreServer | None = None
        self._client: StoreClient | None = None  # of the last generation's store
        self._wanted = Settings()
        self._key: JobKey | None = None
        self._handle = ""
        self._used: set[int] = set()
        self._is_closed = False

    def handle(self) -> str:
        """Return this process's handle, the same for all generations. From now on the process serves a store."""
        if self._is_closed:
            raise ReconfigureError("the process group was destroyed")
        if not self._handle:
            self._wanted = wanted = settings.resolve(settings.environment())
            self._key = _job_key(wanted)
            self._server = StoreServer(f"tcp:{_own_address(wanted)}:0", self._key)
            place = {
                "host": host_identity(wanted.host_id),
                "address": self._server.address,
                "id": secrets.token_hex(8),
            }
            self._handle = json.dumps(place)
        return self._handle

    def plan(self, uuid: int, handles: Collection[str]) -> Generation:
        """Return a generation of which this process is a member.

        `uuid`: the same on all members, never used before by this process. `handles`: those of all members: a list has
        them by rank; from a set, ranks follow from the handles, those of a host one after the other. Raises
        ReconfigureError.
        """
        if uuid in self._used:
            raise ReconfigureError(
                f"uuid {uuid} was already used by this process: every generation needs a new one"
            )
        ordered = list(handles) if isinstance(handles, Sequence) else sorted(handles)
        places = [_place(handle) for handle in ordered]
        if len(set(ordered)) < len(ordered):
            raise ReconfigureError("two of the handles are the same: every member has one place")
        mine = self.handle()
        if mine not in ordered:
            raise ReconfigureError(
                "the handle of this process is not among the handles: only members call reconfigure()"
            )
        self._used.add(uuid)
        is_one_machine = len({place["host"] for place in places}) == 1
        return Generation(uuid, ordered.index(mine), len(ordered), places[0]["address"], is_one_machine)

    def connect(self, planned: Generation, timeout_ns: int) -> GroupConnection:
        """Return the connection of a generation, which all its members make at once.

        Every step ends when `timeout_ns` is over, or a little later. Raises TimeoutError that names the missing ranks,
        PeerLostError if another member raises or dies.
        """
        if planned.size == 1:
            return connect_alone()
        assert self._key is not None
        assert self._server is not None
        address = "127.0.0.1"
        if not planned.is_one_machine:
            address = addresses.parse_address(self._server.address).host
        factory = CommunicatorFactory(self._wanted, self._key, address)
        began_ns = time.monotonic_ns()
        deadline_ns = began_ns + timeout_ns
        try:
            client = self._store_of(planned, timeout_ns)
            with ExitStack() as on_error:
                on_error.callback(self._leave_store)
                made = connect_world(
                    PrefixStore(client, planned.prefix),
                    planned.rank,
                    planned.size,
                    None,
                    max(1, deadline_ns - time.monotonic_ns()),
                    "reconfigure()",
                    lambda exchange: factory,
                )
                on_error.callback(made.close, "the process group was not reconfigured")
                if planned.rank == 0:  # the members are connected, and need their keys no longer
                    client.delete_prefix(planned.prefix)
                on_error.pop_all()
        except PeerLostError as error:
            if error.rank >= 0:
                raise
            waited_ns = time.monotonic_ns() - began_ns
            if waited_ns < timeout_ns:
                raise PeerLostError(f"rank 0 was lost: {error}", 0) from None
            message = f"rank 0 has not answered for {waited_ns / 1e9:.3g} s: {error}"
            raise TimeoutError(message, "reconfigure", waited_ns, (0,)) from None
        return made

    def _store_of(self, planned: Generation, timeout_ns: int) -> StoreClient:
        """Return a connection to the store of the generation, which has been there for as long as its handle.

        So there is nothing to wait for if it does not answer. The connection stays for later generations that meet at
        the same process. Raises TimeoutError that names rank 0.
        """
        assert self._key is not None
        give_up_ns = time.monotonic_ns() + timeout_ns + _GRACE_NS
        client = self._client
        if client is not None and client.address == planned.store and client.is_connected():
            client.give_up_at(give_up_ns)
            return client
        self._leave_store()
        server = "the member of rank 0 serves it; if that process has ended, leave its handle out"
        try:
            self._client = StoreClient(
                *(planned.store, self._key, min(timeout_ns, _ANSWER_NS)),
                patience_ns=0,
                server=server,
                give_up_ns=give_up_ns,
            )
        except TimeoutError as error:
            message = f"rank 0 has not answered: {error}"
            raise TimeoutError(message, "reconfigure", error.waited_ns, (0,)) from None
        return self._client

    def _leave_store(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def close(self) -> None:
        """End the store. A second call does nothing."""
        self._is_closed = True
        self._leave_store()
        server, self._server = self._server, None
        if server is not None:
            server.close()


def get_reconfigure_handle(group: RondeGroup | None = None) -> str:
    """Return the text by which other processes find this one, for `reconfigure`.

    Args:
        group: A process group of the backend "ronde" (None: the default group).

    Raises:
        UsageError: The group has another backend, or this process has no job key.
    """
    return _group(group).get_reconfigure_handle()


def reconfigure(
    uuid: int,
    handles: Collection[str],
    group: RondeGroup | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Give the group new members, and return when they are connected. Only these members call it.

    Pending operations of the old generation raise a PeerError. Other groups, and memory, stay as they are.

    Args:
        uuid: Names the new generation: the same number on all members, not used before by any of them.
        handles: The handle of each member: a list has them by rank, a set leaves the ranks to Ronde.
        group: A process group of the backend "ronde" (None: the default group).
        timeout: How long to wait for the other members (None: the group's timeout).

    Raises:
        ReconfigureError: An argument is invalid. The group has not changed.
        TimeoutError: Members are missing; the error names their ranks. The group is then without connections.
        PeerLostError: A member raised, or died meanwhile. The group is then without connections.
    """
    _group(group).reconfigure_with(uuid, handles, timeout)


def _group(group: Any) -> RondeGroup:
    found: Any = group if group is not None else torch.distributed.group.WORLD
    if not hasattr(found, "reconfigure_with"):
        raise UsageError(f"only process groups of the backend 'ronde' can be reconfigured, not {found!r}")
    return found  # type: ignore[no-any-return]


def _job_key(wanted: Settings) -> JobKey:
    return find_job_key(
        _JOB,
        environment(),
        key=wanted.job_key,
        descriptor=wanted.job_key_fd,
        file=wanted.job_key_file,
        is_insecure=wanted.insecure_job_key,
        is_one_machine=True,  # not known yet; members with different keys refuse each other
    )


def _own_address(wanted: Settings) -> str:
    if wanted.interface:
        return addresses.address_of_interface(wanted.interface)
    try:
        return address_towards("")
    except UsageError:  # this machine has no network
        return "127.0.0.1"


def _place(handle: str) -> dict[str, str]:
    try:
        place = json.loads(handle)
        if all(isinstance(place[name], str) for name in ("host", "address", "id")):
            return place  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError):
        pass
    raise ReconfigureError(
        f"{str(handle)[:100]!r} is not a handle that get_reconfigure_handle() has returned"
    )
