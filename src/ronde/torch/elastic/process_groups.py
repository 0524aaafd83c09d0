"""The default process group of torch.distributed in a process that outlives rounds.

1. Each round has one meeting of all its ranks about the default group. A process comes to it when its script calls
   `init_process_group`, or else before its state is synchronized. So survivors and new processes meet, wherever a new
   process stands in its script.
2. If all of them have a default group, or make one, they make it again, in the same way. With the backend "ronde"
   survivors keep the object, which gets new members. Otherwise they destroy it and make another one, at a store that
   rank 0 serves.
3. A group that was made in the training function is destroyed when the function ends by a loss. The function makes it
   again.
4. After a loss, all groups are aborted, so that operations that wait for another survivor end, too. Gloo ends
   operations only when its connections end, so these are shut down.
5. A rank may be lost while the others make a group. Groups of other backends are made by a thread that their caller
   leaves when the round is over (`bounded_calls`). A new process then goes on to the next round, too.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ronde.comm.world import local_size, rank, size
from ronde.elastic.running import add_companion
from ronde.engine import process
from ronde.engine.objects import allgather_object, broadcast_object
from ronde.environment import environment
from ronde.errors import (
    AbortedError,
    PeerError,
    PeerLostError,
    RemoteError,
    RondeError,
    TimeoutError,
    UsageError,
)
from ronde.net.addresses import address_towards
from ronde.process.membership_channel import Membership, membership
from ronde.torch.elastic.bounded_calls import call_until_over

__all__ = ["abort", "follow_worlds", "has_default_group", "is_peer_loss", "leave", "meet"]

_NAME = "ronde.elastic.process_group"
NOTICE_S = 5.0  # the launcher hears of a lost rank of this host within this time
_ARGUMENTS = [
    "init_method",
    "timeout",
    "world_size",
    "rank",
    "store",
    "group_name",
    "pg_options",
    "device_id",
]
_PLACE = ("rank", "world_size", "store", "init_method")  # arguments that follow from the round


@dataclass(frozen=True)
class _Request:
    """How a program makes its default group."""

    backend: str
    named: dict[str, Any]

    @property
    def is_by_handles(self) -> bool:
        """Whether members that it has keep the group when it gets others.

        Gloo's `reconfigure` needs a store that outlives all members, so its groups are made again.
        """
        return self.backend == "ronde"

    @property
    def begins_without_members(self) -> bool:
        """Whether the program has asked for a group that has no members before its first `reconfigure`."""
        options = self.named.get("pg_options")
        wants = self.named.get("enable_reconfigure") or getattr(options, "enable_reconfigure", False)
        return self.is_by_handles and bool(wants)


@dataclass
class _OfProcess:
    """The default group of this process; one instance, below."""

    make: Callable[..., Any] | None = None  # PyTorch's init_process_group
    request: _Request | None = (
        None  # of the present default group, unless it was made in the training function
    )
    met: int = -1  # the last round to whose meeting this process came
    is_unmade: bool = False  # it was to be made, and a loss has come first
    is_training: bool = False
    listens: bool = False  # for lost rounds
    sockets: dict[int, int] = field(
        default_factory=dict
    )  # of the groups: descriptors, with the inode of each


_own = _OfProcess()


class _Companion:
    """What `ronde.elastic.run` calls."""

    def means_loss(self, error: Exception) -> bool:
        return is_peer_loss(error)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Have groups that the program makes within the block end with it."""
        before, _own.is_training = _own.is_training, True
        try:
            yield
        finally:
            _own.is_training = before

    def leave(self, is_loss: bool) -> None:
        if membership() is not None:
            leave()

    def join(self) -> None:
        meet()


_companion = _Companion()


def follow_worlds() -> None:
    """Have `ronde.elastic.run` end and make the groups, and `init_process_group` come to the meeting.

    A second call does nothing. A process that no agent can give a place in another round calls PyTorch's functions as
    they are. That is found out when they are called, because a template imports modules for workers that it forks.
    """
    if _own.make is not None or not dist.is_available():
        return
    add_companion(_companion)
    _own.make = dist.init_process_group
    init_process_group = _with_meeting(dist.init_process_group)
    new_group = _noting_sockets(dist.new_group)
    for module in (dist, distributed_c10d):
        module.init_process_group = init_process_group
        module.new_group = new_group


def _heard_membership() -> Membership | None:
    """Return the channel to the agent, if there is one. From the first call on a lost round aborts the groups."""
    mine = membership()
    if mine is not None and not _own.listens:
        _own.listens = True
        mine.on_lost(lambda lost: abort())
    return mine


def has_default_group() -> bool:
    """Return whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def abort() -> None:
    """End all operations of all groups, with an error, here and on the members that wait for this rank. Any thread."""
    if not has_default_group():
        return
    _shut_down_sockets()
    for group in list(distributed_c10d._world.pg_names):
        with suppress(RuntimeError, RondeError):
            group.abort() if hasattr(group, "abort") else None


def leave() -> None:
    """Abort the groups of a world that has ended, and destroy those that cannot have other members."""
    if not has_default_group() and not _own.is_unmade:
        _own.request = None
    abort()
    if _own.request is None or not (_own.request.is_by_handles and _supports_reconfigure()):
        _destroy()


def meet(request: _Request | None = None) -> None:
    """Come to the round's meeting about the default group; a second call in a round does nothing.

    All ranks call it, once they have joined the world of the round. `request`: how the program makes the group, if it
    does so now; None: if there is one, it becomes one of this round. Raises UsageError if only some ranks have one.
    """
    mine = _heard_membership()
    if mine is None or _own.met == mine.number:
        return
    _own.met = mine.number
    wanted = request or _own.request
    begins_alone = mine.number > 0 or (wanted is not None and wanted.begins_without_members)
    if wanted is not None and wanted.is_by_handles and begins_alone and not has_default_group():
        _make_lone(wanted)
    handle = _handle() if wanted is not None and wanted.is_by_handles else ""
    facts = allgather_object((wanted is not None, handle), _NAME)
    lacking = [rank for rank, (has, _) in enumerate(facts) if not has]
    if lacking:
        _destroy()
        _own.request = None
        if request is not None:
            raise UsageError(
                f"init_process_group: the ranks {', '.join(map(str, lacking))} have no default process group: let all "
                "ranks call init_process_group before the training function, or all of them in it"
            )
        return
    if wanted is None:
        return
    _own.request, _own.is_unmade = wanted, True
    if all(handle for _, handle in facts):
        _reconfigure(mine.number, [handle for _, handle in facts], wanted)
    else:
        _destroy()
        _make_at_new_store(wanted)
    _own.is_unmade = False


def _supports_reconfigure() -> bool:
    return has_default_group() and bool(getattr(dist.group.WORLD, "supports_reconfigure", False))


def _with_meeting(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> None:
        mine = _heard_membership()
        if mine is None or dist.is_initialized():  # then it raises
            make(backend, *arguments, **named)
            return
        given = {**dict(zip(_ARGUMENTS, arguments)), **named}
        while True:
            try:
                _init_process_group(mine, "" if backend is None else str(backend), given)
                return
            except Exception as error:
                if not is_peer_loss(error) or _own.is_training or (reason := _why_over(mine)) is None:
                    raise
                if not mine.continues:
                    raise PeerLostError(
                        f"init_process_group: round {mine.number} of the job, which this process was joining, is over: "
                        f"{reason}"
                    ) from error
            # A new process that outlives rounds, though it has not come to `elastic.run`.
            leave()
            process.shutdown()
            mine.await_place()

    return init_process_group


def _why_over(mine: Membership) -> str | None:
    """Return why the round is over; None if nobody says so soon, as when the error has another reason."""
    until = time.monotonic() + NOTICE_S
    while (reason := mine.over) is None and time.monotonic() < until:
        time.sleep(0.02)
    return reason


def _init_process_group(mine: Membership, backend: str, given: dict[str, Any]) -> None:
    process.init_again()
    request = _Request(backend, {name: value for name, value in given.items() if name not in _PLACE})
    if not _own.is_training and _own.met != mine.number:
        meet(request)
    elif given.get("store") is None and given.get("init_method") in (None, "env://"):
        _make_at_new_store(request)
    else:
        _make(_Request(backend, given))


def _make(request: _Request, get_store: Callable[[], Any] | None = None, **place: Any) -> None:
    """Make the default group. `get_store`: returns the store; it may wait for the rank that serves it."""

    def make() -> None:
        assert _own.make is not None
        store = {} if get_store is None else {"store": get_store()}
        _own.make(request.backend or None, **request.named, **place, **store)

    with _noted():
        if request.backend == "ronde":
            make()  # its waits end when the round is over
            return
        try:
            _call_bounded(make)
        except Exception:
            if not dist.is_initialized():
                distributed_c10d._world.group_count = 0  # a part of the names, which all ranks must agree on
            raise


def _call_bounded(make: Callable[[], Any]) -> Any:
    mine, before = membership(), _open_sockets()
    if mine is None:
        return make()

    def why_over() -> str | None:
        # A change without a loss waits for the next commit of a training.
        return mine.lost if _own.is_training else mine.over

    try:
        return call_until_over(make, why_over, lambda: _shut_down_all(_of_native_code(_opened_since(before))))
    except Exception as error:
        # The connection to a lost rank breaks before the launcher says that the rank is lost.
        if isinstance(error, PeerError) or not is_peer_loss(error):
            raise
        raise PeerLostError(
            f"the process group cannot be made: the connection to another rank was lost ({error})"
        ) from error


def _make_at_new_store(request: _Request) -> None:
    """Make a default group of all ranks, at a store that rank 0 serves from now on. All ranks call it."""
    me, ranks = rank(), size()
    served, address = None, ("", 0)
    if me == 0:
        host = "127.0.0.1" if local_size() == ranks else environment().get("MASTER_ADDR") or address_towards()
        served = dist.TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False)
        address = host, served.port
    host, port = broadcast_object(address, 0, f"{_NAME}.store")

    def store() -> Any:
        return served or dist.TCPStore(host, port, ranks, is_master=False, wait_for_workers=False)

    # It has its members from the beginning; `reconfigure` is for a program that chooses them.
    named = {name: value for name, value in request.named.items() if name != "enable_reconfigure"}
    _make(_Request(request.backend, named), store, rank=me, world_size=ranks)


def _make_lone(request: _Request) -> None:
    """Make a default group without members, for `_reconfigure`."""
    from ronde.torch.distributed import Options

    named = {**request.named, "pg_options": Options(enable_reconfigure=True)}
    _make(_Request(request.backend, named), store=dist.HashStore(), rank=0, world_size=1)


def _handle() -> str:
    if not _supports_reconfigure():
        return ""
    return str(dist.group.WORLD.get_reconfigure_handle())


def _reconfigure(number: int, handles: list[str], request: _Request) -> None:
    group: Any = dist.group.WORLD
    timeout = request.named.get("timeout")
    with _noted():
        group.reconfigure_with(number, handles, timeout)
    # PyTorch's functions look up which ranks the default group has.
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(len(handles))}


def _destroy() -> None:
    """Destroy all groups, whatever their state."""
    if not has_default_group():
        return
    _shut_down_sockets()
    try:
        if hasattr(distributed_c10d, "_abort_process_group"):
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    except (RuntimeError, ValueError, RondeError):
        dist.destroy_process_group()


# The connections of Gloo


def _noting_sockets(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def making(*arguments: Any, **named: Any) -> Any:
        if membership() is None:
            return make(*arguments, **named)
        with _noted():
            if hasattr(dist.group.WORLD, "reconfigure_with") and named.get("backend") in (None, "ronde"):
                return make(*arguments, **named)
            return _call_bounded(lambda: make(*arguments, **named))

    return making


@contextmanager
def _noted() -> Iterator[None]:
    """Note the sockets that are opened within the block as those of groups."""
    before = _open_sockets()
    try:
        yield
    finally:
        after = _open_sockets()
        _own.sockets = {fd: inode for fd, inode in _own.sockets.items() if after.get(fd) == inode}
        _own.sockets.update(_opened_since(before))


def _shut_down_sockets() -> None:
    """End the connections of groups, unless Ronde carries them all: its groups have a separate abort."""
    noted, _own.sockets = _own.sockets, {}
    if all(hasattr(group, "reconfigure_with") for group in list(distributed_c10d._world.pg_names)):
        return
    _shut_down_all(_of_native_code(noted))


def _shut_down_all(sockets: dict[int, int]) -> None:
    for fd, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(fd).st_ino == inode:
                _shut_down(fd)


def _shut_down(fd: int) -> None:
    copied = socket.socket(fileno=os.dup(fd))
    try:
        copied.getpeername()  # raises for a listening socket, which Gloo's thread could not bear to lose
        if copied.family in (socket.AF_INET, socket.AF_INET6):
            copied.shutdown(socket.SHUT_RDWR)
    finally:
        copied.close()


def _of_native_code(sockets: dict[int, int]) -> dict[int, int]:
    """Return those that no Python object owns: another thread may open sockets while groups are made.

    The TCP connections of groups belong to C++ code. So do those of a database driver in C, for example, which could be
    taken for a group's if another thread opens them in these milliseconds.
    """
    if not sockets:
        return {}
    # Not `isinstance`: that asks proxies for their class, which may raise, as a dead weak reference does, or warn.
    owned = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
    return {fd: inode for fd, inode in sockets.items() if fd not in owned}


def _opened_since(before: dict[int, int]) -> dict[int, int]:
    return {fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode}


def _open_sockets() -> dict[int, int]:
    """Return the inode of each socket of this process, by its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


# Errors

# PyTorch's C++ code turns errors into RuntimeErrors, so the text has to tell. The patterns are those of Ronde in DDP's
# backward pass, of Gloo, of NCCL, and of PyTorch's store.
_RONDE = "|".join(error.__name__ for error in (PeerLostError, AbortedError, RemoteError, TimeoutError))
_LOSS = re.compile(
    rf"\b({_RONDE}): "  # in a callback of DDP
    r"|\bgloo\b.*(closed by peer|reset by peer|broken pipe|timed out|read error|write error|connection refused)"
    r"|\bgloo\b.*\b(abort|closed)"
    r"|application timeout caused pair closure"
    r"|process group.*\babort|\bbackend\b.*\baborted"
    r"|nccl.*(remote process exited|remote error|aborted|communicator was aborted|timed out)"
    r"|tcpstore.*(reset by peer|broken pipe|connection refused|failed to recv|closed)"
    r"|(failed to (recv|send)|recvvalue|sendbytes|recvbytes).*(peer|broken pipe|connection)"
    r"|^(connection (reset|closed) by peer|broken pipe)\b",  # DistNetworkError without its stack
    re.IGNORECASE | re.DOTALL,
)
_OF_DISTRIBUTED = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an exception, or one that caused it, means that another rank was lost.

    True for each PeerError, and for errors of torch.distributed with the words of a lost connection.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, PeerError):
            return True
        if (
            isinstance(found, RuntimeError)
            and type(found).__name__ in _OF_DISTRIBUTED
            and _LOSS.search(str(found))
        ):
            return True
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False
