"""What a process group has of the data plane: a communicator, its queue of calls, and a share of a mailbox.

The first group of a process, which has all ranks, connects them: a *world*. Later groups are made of its connections by
their members alone: their ranks are those of the world, and their messages travel through the world's one mailbox,
where a number distinguishes the groups. A group without a world, because the default group has another backend, is a
world of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch.distributed import Store

from ronde import _native, settings
from ronde.comm.byte_exchange import Exchange
from ronde.comm.communicator import Communicator
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.errors import RondeError
from ronde.job_key import JobKey
from ronde.torch.distributed.meeting import Meeting

__all__ = ["Connection", "connect_by_store", "connect_group", "make_world", "world_of_default_group"]


class Connection:
    """The members of one group, connected. `ranks`: by rank of the group, the rank in the world of the mailbox."""

    def __init__(
        self, communicator: Communicator, mailbox: _native.Mailbox, ranks: Sequence[int], is_world: bool
    ) -> None:
        self.communicator, self.mailbox, self.ranks = communicator, mailbox, ranks
        self.queue = _native.CallQueue(communicator.native)
        self.context = int.from_bytes(hashlib.blake2b(communicator.label.encode(), digest_size=8).digest())
        self.is_default = False  # whether new groups are made of it
        self._is_world = is_world
        self._pid = os.getpid()
        self._is_open = True
        _open.add(self)

    @property
    def is_open(self) -> bool:
        """Whether the group has been neither closed nor aborted."""
        return self._is_open

    def abort(self, reason: str) -> None:
        """Fail pending and later operations of the group, here and on the other members. Any thread may call it."""
        self._end(reason)
        if self._pid == os.getpid():
            self.communicator.abort(reason)

    def close(self, reason: str) -> None:
        """Leave the group: members finish operations that do not need this rank. Pending operations here fail."""
        self._end(reason)
        if self._pid != os.getpid():
            return
        if self._is_world:
            self.mailbox.close(reason)
        self.communicator.shutdown()

    def _end(self, reason: str) -> None:
        if not self._is_open or self._pid != os.getpid():
            return
        self._is_open = False
        _open.discard(self)
        self.queue.close(reason)
        self.mailbox.cancel(self.context, reason)


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def world_of_default_group() -> Connection | None:
    """Return the world of the default group, if this backend serves that and it is open."""
    return next((each for each in list(_open) if each.is_default), None)


def connect_by_store(
    store: Store, rank: int, size: int, timeout_ns: int, *, is_default: bool = False
) -> Connection:
    """Return a world of `size` ranks, which all call it and meet at the store.

    `is_default`: groups are made of it from now on. Raises TimeoutError that names the missing ranks, UsageError if
    there is no job key, MismatchError if settings differ that must be equal.
    """
    wanted = settings.resolve(settings.environment())
    deadline_ns = time.monotonic_ns() + timeout_ns
    if size == 1:
        factory = CommunicatorFactory(wanted, JobKey.generate())
        made = make_world(factory, 0, 1, lambda mine: [mine], "torch.distributed", deadline_ns)
    else:
        meeting = Meeting(store, rank, size, deadline_ns)
        try:
            place = meeting.agree_on_place(wanted)
            factory = CommunicatorFactory(wanted, place.key, place.address)
            made = make_world(factory, rank, size, meeting.exchange, place.name, deadline_ns, meeting.check)
        except BaseException as error:
            meeting.tell_failure(error)
            raise
    made.is_default = is_default
    return made


def make_world(
    factory: CommunicatorFactory,
    rank: int,
    size: int,
    exchange: Exchange,
    name: str,
    deadline_ns: int,
    check: Callable[[], None] | None = None,
) -> Connection:
    """Return a world, which all of its ranks make at once. `name`: the same on all of them, used once."""
    communicator = factory.make_world(rank, size, exchange, name, deadline_ns, check)
    try:
        with communicator.connecting_by(deadline_ns):
            messages = communicator.duplicate()
    except BaseException:
        communicator.shutdown()
        raise
    return Connection(communicator, _native.Mailbox(messages.native), range(size), is_world=True)


def connect_group(
    world: Connection, store: Store, ranks: Sequence[int], name: str, timeout_ns: int
) -> Connection:
    """Return a group of these ranks of the world, which its members make alone.

    `name`: the same on all of them, used once for these ranks. Raises as `connect_by_store`.
    """
    deadline_ns = time.monotonic_ns() + timeout_ns
    rank = list(ranks).index(world.communicator.rank)

    def check() -> None:
        if world.communicator.has_failed():
            world.communicator.barrier()  # raises the failure

    meeting = Meeting(store, rank, len(ranks), deadline_ns, check)
    try:
        communicator = world.communicator.group_by(meeting.exchange, ranks, repr(name), deadline_ns)
    except BaseException as error:
        meeting.tell_failure(error)
        raise
    return Connection(communicator, world.mailbox, [world.ranks[each] for each in ranks], is_world=False)


@atexit.register
def _leave_all() -> None:
    """Leave the groups that the program has not destroyed."""
    for connection in list(_open):
        with suppress(RondeError):
            connection.close("the process ends")
