"""Process groups whose members change while their processes go on.

A process that wants to be a member of the next generation of a group tells its *handle* to the program that decides
about that generation: a text that says where the process listens, and has its settings. All members of a generation get
the same list of handles, so each one knows whom to connect to. No store is needed, neither torch.distributed's nor
another one, and no process has to outlive the others.

The members recognise each other by the user's key file or the key that the launcher gave them (`net/job_keys`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import socket
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed

from ronde import settings
from ronde.comm.bootstrap import RankRecord
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.errors import ProtocolError, TimeoutError, UsageError, VersionError
from ronde.job_key import JobKey
from ronde.net import addresses
from ronde.net.job_keys import find_job_key
from ronde.settings import Settings, environment
from ronde.torch.distributed.connection import GroupConnection, connect_alone, connect_known_world
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
    """One generation of a group. `name`: of it alone. `rank`: of this process. `records`: of the members, by rank."""

    name: str
    rank: int
    records: Sequence[RankRecord]

    @property
    def size(self) -> int:
        return len(self.records)


class Generations:
    """How one process takes part in the generations of a group."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._wanted = Settings()
        self._key: JobKey | None = None
        self._handle = ""
        self._used: set[int] = set()
        self._is_closed = False

    def handle(self) -> str:
        """Return this process's handle, the same for all generations. From now on the process listens."""
        if self._is_closed:
            raise ReconfigureError("the process group was destroyed")
        if not self._handle:
            self._wanted = wanted = settings.resolve(settings.environment())
            self._key = _job_key(wanted)
            tcp, address = addresses.listen(addresses.Address(host=_own_address(wanted)))
            self._listeners.append(tcp)
            record = RankRecord.of(secrets.token_hex(8), wanted, str(address))
            unix, _ = addresses.listen(addresses.parse_address(record.unix))
            self._listeners.append(unix)
            _listening.add(self)
            self._handle = record.encode().decode()
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
        if strange := [each for each in ordered if not isinstance(each, str)]:
            raise _no_handle(strange[0])
        records = [_record(handle) for handle in ordered]
        if len(set(ordered)) < len(ordered):
            raise ReconfigureError("two of the handles are the same: every member has one place")
        mine = self.handle()
        if mine not in ordered:
            raise ReconfigureError(
                "the handle of this process is not among the handles: only members call reconfigure()"
            )
        self._used.add(uuid)
        members = hashlib.blake2b("\n".join(ordered).encode(), digest_size=16).hexdigest()
        return Generation(f"generation {uuid} of {members}", ordered.index(mine), records)

    def connect(self, planned: Generation, timeout_ns: int) -> GroupConnection:
        """Return the connection of a generation, which all its members make at once.

        Every step ends when `timeout_ns` is over, or a little later. Raises TimeoutError that names the missing ranks,
        PeerLostError if another member raises or dies.
        """
        if planned.size == 1:
            return connect_alone()
        assert self._key is not None
        factory = CommunicatorFactory(self._wanted, self._key)
        deadline_ns = time.monotonic_ns() + timeout_ns
        try:
            return connect_known_world(
                factory, planned.rank, planned.records, self._listeners, planned.name, deadline_ns
            )
        except TimeoutError as error:
            message = f"{error}; every member must call reconfigure() with the same uuid and handles in time"
            raise TimeoutError(message, "reconfigure", error.waited_ns, error.missing) from None

    def close(self) -> None:
        """Listen no more. A second call does nothing."""
        self._is_closed = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()


_listening: weakref.WeakSet[Generations] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close the listeners in a forked child: else others would wait for its parent, which may have died."""
    for generations in list(_listening):
        generations.close()


os.register_at_fork(after_in_child=_close_inherited)


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
    """Give the group new members, and return when this one is connected to all others. Only these members call it.

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


@functools.lru_cache(maxsize=4096)  # the members of one generation are mostly those of the last one
def _record(handle: str) -> RankRecord:
    try:
        record = RankRecord.decode(handle.encode(), -1)
        unix, tcp = addresses.parse_address(record.unix), addresses.parse_address(record.address)
        if unix.is_unix and not tcp.is_unix:
            return record
    except VersionError:
        raise
    except (ProtocolError, UsageError):
        pass
    raise _no_handle(handle)


def _no_handle(found: object) -> ReconfigureError:
    return ReconfigureError(
        f"{str(found)[:100]!r} is not a handle that get_reconfigure_handle() has returned"
    )
