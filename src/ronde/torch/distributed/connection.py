"""The data plane of a process group: a communicator, its queue of calls, and a share of a mailbox.

The first group of a process, which has all ranks, connects them: a *world*. Later groups are made of its connections by
their members alone: their ranks are those of the world, and their messages travel through the world's one mailbox,
where a number distinguishes the groups. A group without a world, because the default group has another backend, is a
world of its own.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import multiprocessing.util
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from ronde import _native, settings
from ronde.comm.bootstrap import RankRecord
from ronde.comm.byte_exchange import Exchange
from ronde.comm.communicator import Communicator
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.world_attempt import WorldAttempt
from ronde.errors import RondeError
from ronde.job_key import JobKey
from ronde.stores.store import Store
from ronde.torch.distributed.meeting import MailboxMeeting, meet

__all__ = [
    "GroupConnection",
    "connect_alone",
    "connect_group",
    "connect_known_world",
    "connect_world",
    "world_of_default_group",
]


class GroupConnection:
    """The members of one group, connected.

    `ranks`: by rank of the group, the rank in the world. `world`: of which the group is made; None: it is one.
    `messages`: the communicator that a world's mailbox has taken over.
    """

    def __init__(
        self,
        communicator: Communicator,
        mailbox: _native.Mailbox,
        ranks: Sequence[int],
        stall_warning_ns: int,
        world: GroupConnection | None = None,
        messages: Communicator | None = None,
    ) -> None:
        self.communicator, self.mailbox, self.ranks = communicator, mailbox, ranks
        self._messages = messages
        self.queue = _native.CallQueue(communicator.native)
        self.context = _context_of(communicator.label)
        self.stall_warning_ns = stall_warning_ns
        self.is_default = False  # whether new groups are made of it
        self.groups: weakref.WeakSet[GroupConnection] = weakref.WeakSet()
        self.names_used: dict[
            int, int
        ] = {}  # by the context of their meeting, how many groups had these ranks
        self.monitored_barriers = 0
        self._world = world  # keeps its connections open
        self._pid = os.getpid()
        self._is_open = True
        _open.add(self)
        _leave_when_a_child_ends()

    @property
    def world(self) -> GroupConnection:
        """The world of which the group is made, or which it is."""
        return self if self._world is None else self._world

    @property
    def is_open(self) -> bool:
        """Whether this process can use the group: it has neither left nor aborted it, and is not a forked child."""
        return self._is_open and self._pid == os.getpid()

    def abort(self, reason: str) -> None:
        """Fail pending and later operations of the group, here and on the other members. Any thread may call it.

        The connections stay open as long as there are groups of this world.
        """
        if self.is_open:
            self._end(reason)
            self.communicator.abort(reason)
            self._leave()

    def close(self, reason: str) -> None:
        """Leave the group: members finish operations that do not need this rank. Pending operations here fail."""
        if self.is_open:
            self._end(reason)
            self._leave()

    def _end(self, reason: str) -> None:
        self._is_open = False
        _open.discard(self)
        self.queue.close(reason)
        self.mailbox.cancel(self.context, reason)

    def _leave(self) -> None:
        if any(group.is_open for group in self.groups):
            # Its groups need the connections, which they share. Its own calls end, also on the others.
            self.communicator.leave_stalls()
            self.communicator.native.shutdown()
            return
        if self._messages is not None:
            self.mailbox.close("the process group has ended")
            self._messages.shutdown()
        self.communicator.shutdown()
        if self._world is not None and not self._world.is_open:
            self._world._leave()  # this was its last group


_open: weakref.WeakSet[GroupConnection] = weakref.WeakSet()


def world_of_default_group() -> GroupConnection | None:
    """Return the world of the default group, if this backend serves that and it is open."""
    return next((each for each in list(_open) if each.is_default and each.is_open), None)


def connect_alone() -> GroupConnection:
    """Return a world of this process alone."""
    wanted = settings.resolve(settings.environment())
    factory = CommunicatorFactory(wanted, JobKey.generate())
    return _make_world(factory, 0, 1, lambda mine: [mine], "torch.distributed", time.monotonic_ns() + 10**10)


def connect_world(
    store: Store,
    rank: int,
    size: int,
    name: str | None,
    timeout_ns: int,
    call: str,
    factory_of: Callable[[Exchange], CommunicatorFactory],
) -> GroupConnection:
    """Return a world of `size` ranks, which all call it and meet at the store.

    `name`: of the group, if groups of that name may be made again at this store. `call`: the user's, for messages.
    `factory_of`: makes the connections. Raises TimeoutError that names the missing ranks, UsageError if there is no job
    key, MismatchError if settings differ that must be equal.
    """
    if size == 1:
        return connect_alone()
    deadline_ns = time.monotonic_ns() + timeout_ns

    def make(attempt: WorldAttempt) -> GroupConnection:
        factory = factory_of(attempt.exchange)
        return _make_world(factory, rank, size, attempt.exchange, attempt.name, deadline_ns, attempt.check)

    return meet(store, rank, size, name, deadline_ns, make, call)


def connect_known_world(
    factory: CommunicatorFactory,
    rank: int,
    records: Sequence[RankRecord],
    listeners: Sequence[socket.socket],
    name: str,
    deadline_ns: int,
) -> GroupConnection:
    """Return a world of ranks that know the records of all, and need no store; all of them call it.

    `name`: of this world alone. Raises TimeoutError that names the missing ranks, PeerLostError, MismatchError.
    """
    tag = hashlib.blake2b(name.encode(), digest_size=8).digest()
    made = factory.make_known_world(rank, records, listeners, name, tag, deadline_ns)
    return _connection_of(factory, *made)


def connect_group(world: GroupConnection, ranks: Sequence[int], timeout_ns: int) -> GroupConnection:
    """Return a group of these ranks of the world, which its members make alone, one after the other for equal ranks.

    Raises TimeoutError that names the missing ranks, PeerLostError. After that, this world can have no group of these
    ranks any more: its members may have stopped at different places.
    """
    deadline_ns = time.monotonic_ns() + timeout_ns
    me = world.communicator.rank
    # PyTorch's name of the group is not the same on all members: each process counts the groups that it has made.
    context = _context_of(f"a group of {','.join(map(str, ranks))}")
    meeting = MailboxMeeting(world.mailbox, ranks, me, context, deadline_ns)
    try:
        times = max(int(each) for each in meeting.exchange(b"%d" % world.names_used.get(context, 0)))
        world.names_used[context] = times + 1
        communicator = world.communicator._group_by(meeting.exchange, ranks, f"#{times}", deadline_ns)
    except BaseException as error:
        meeting.tell_failure(error)
        raise
    members = [world.ranks[each] for each in ranks]
    group = GroupConnection(communicator, world.mailbox, members, world.stall_warning_ns, world)
    world.groups.add(group)
    return group


def _make_world(
    factory: CommunicatorFactory,
    rank: int,
    size: int,
    exchange: Exchange,
    name: str,
    deadline_ns: int,
    check: Callable[[], None] | None = None,
) -> GroupConnection:
    # Between hosts the mailbox has one stream: a message that a rank has sent before it leaves arrives before the end
    # of the connection.
    return _connection_of(
        factory, *factory.make_world_with_twin(rank, size, exchange, name, deadline_ns, check)
    )


def _connection_of(
    factory: CommunicatorFactory, communicator: Communicator, messages: Communicator
) -> GroupConnection:
    mailbox = _native.Mailbox(messages.native)
    ranks = range(communicator.size)
    return GroupConnection(communicator, mailbox, ranks, factory.wanted.stall_warning_ns, messages=messages)


def _context_of(name: str) -> int:
    """Return the number that keeps messages of this name apart from all others."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@functools.cache  # once for each process: forked children forget it
def _leave_when_a_child_ends() -> None:
    """Leave all groups when this process ends, if it is a child of `multiprocessing`: those run no exit handlers."""
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=0)


os.register_at_fork(after_in_child=_leave_when_a_child_ends.cache_clear)


@atexit.register
def _leave_all() -> None:
    """Leave the groups that the program has not destroyed."""
    for connection in list(_open):
        with suppress(RondeError):
            connection.close("the process ends")
