"""The channel of one worker to its agent about the worker's place in the job, so that a worker can outlive a round.

A pair of connected sockets; a packet is one message, at most `MAX_BYTES` long. The variable `_RONDE_MEMBERSHIP` holds
the descriptor of the worker's end, its device and inode, so a process that inherits the variable without the descriptor
does not use another file of that number.

The agent decides who is in a round. It sends `PlaceInRound` to each worker that continues, and to spares and
replacements, which start without a rank; `RoundLost` when a member of the worker's round is lost; `ChangeWanted` when a
round without a loss is to follow; `TrainingCompleted` when another worker has sent `Completed`. A worker sends
`Continues` once, `Awaits` whenever it has left the world of a round, and `Completed` when all ranks have finished.

The worker's end is used from any thread; a daemon thread reads it. A forked child has no channel.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ronde.environment import environment, set_variable
from ronde.errors import PeerLostError, ProtocolError, TimeoutError
from ronde.typed_json import Natural, TypedJson

__all__ = [
    "MAX_BYTES",
    "NO_ROUND",
    "Awaits",
    "ChangeWanted",
    "Completed",
    "Continues",
    "Membership",
    "MembershipChannel",
    "News",
    "PlaceInRound",
    "RoundLost",
    "TrainingCompleted",
    "membership",
]

MAX_BYTES = 1 << 16
LOWEST_FD = 200  # of the worker's end
VARIABLE = "_RONDE_MEMBERSHIP"
ROUND = "RONDE_ROUND"
NO_ROUND = -1

_log = logging.getLogger(__name__)
RoundOrNone = Annotated[int, range(NO_ROUND, 1 << 62)]


# From the agent to a worker


@dataclass(frozen=True)
class PlaceInRound:
    """The worker's place in a round that has begun.

    `environment`: all variables of ranks and meeting point that a worker started for this round would get. `reason`:
    why the round began, one line. `lost`: the members of the round before that are gone, with their rank and host.
    """

    number: Natural
    environment: Mapping[str, str] = field(repr=False)  # the job key may be in it
    reason: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundLost:
    """The round has lost a member: the operations of its world must raise now."""

    number: Natural
    reason: str


@dataclass(frozen=True)
class ChangeWanted:
    """A round after `number` will begin, or has begun, without a loss: come at the next commit."""

    number: Natural
    reason: str


@dataclass(frozen=True)
class TrainingCompleted:
    """Another worker knows that all ranks have finished their training of this number: none needs a place for it."""

    training: Natural


# From a worker to the agent


@dataclass(frozen=True)
class Continues:
    """The worker survives the end of a round from now on."""


@dataclass(frozen=True)
class Awaits:
    """The worker has left the world of round `after` (-1: it has had none) and waits for a place in a later one."""

    after: RoundOrNone


@dataclass(frozen=True)
class Completed:
    """All ranks have finished: there is nothing to recover any more, and exit code 0 of this worker is success.

    `training`: its number among those of this worker, from 1.
    """

    training: Natural


FromAgent = PlaceInRound | RoundLost | ChangeWanted | TrainingCompleted
News = PlaceInRound | RoundLost | TrainingCompleted
FromWorker = Continues | Awaits | Completed
FROM_AGENT: TypedJson[FromAgent] = TypedJson(FromAgent, "message of the agent to a worker")
FROM_WORKER: TypedJson[FromWorker] = TypedJson(FromWorker, "message of a worker to its agent")


def _encode(message: FromAgent | FromWorker) -> bytes:
    data = FROM_AGENT.encode(message) if isinstance(message, FromAgent) else FROM_WORKER.encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"a {type(message).__name__} of {len(data)} bytes exceeds the {MAX_BYTES} of the channel"
        )
    return data


class MembershipChannel:
    """The agent's end of the channel of one worker.

    The worker starts with `environment` and inherits `worker_fd` under its number. When it has started, or if it could
    not, the agent calls `close_worker_end`. Nothing blocks.
    """

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs = _with_high_number(theirs)
        self._mine.setblocking(False)
        self.worker_fd = self._theirs.fileno()
        self.has_ended = False  # the worker's end is closed: the worker has ended, or replaced its program

    @property
    def environment(self) -> dict[str, str]:
        """The variables for the worker. A spare or replacement gets no variable of ranks beside it."""
        return {VARIABLE: _identify(self.worker_fd)}

    def close_worker_end(self) -> None:
        """Close this process's copy of the worker's end."""
        self._theirs.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the worker has sent something or has ended."""
        return self._mine.fileno()

    def send(self, message: FromAgent) -> bool:
        """Send a message. Return False if the worker has ended, or has read nothing for about 200 KiB of messages.

        Raises ValueError if the message is longer than `MAX_BYTES`.
        """
        try:
            self._mine.send(_encode(message), socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def read(self) -> list[FromWorker]:
        """Return what the worker has sent since the last call; sets `has_ended`. Raises ProtocolError."""
        found: list[FromWorker] = []
        while not self.has_ended:
            try:
                data = self._mine.recv(MAX_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended with messages unread; its own may follow
                continue
            if data:
                found.append(FROM_WORKER.decode(data))
            else:
                self.has_ended = True
        return found

    def close(self) -> None:
        """Close both ends."""
        self._mine.close()
        self._theirs.close()


def _with_high_number(low: socket.socket) -> socket.socket:
    """Return the socket under a number at which the imports of a template have opened nothing (`launch/templates`)."""
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
    except OSError:  # the limit of this process is lower
        return low
    low.close()
    return socket.socket(fileno=fd)


def _identify(fd: int) -> str:
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


# In a worker


class Membership:
    """The worker's end of the channel. `fd`: its descriptor, which this object owns. `number`: the worker's round.

    A daemon thread reads from now on. All methods can be called from any thread.
    """

    def __init__(self, fd: int, number: int = NO_ROUND) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)  # whatever the program's default is
        self._changed = threading.Condition()
        self._newest: PlaceInRound | None = None
        self._taken: PlaceInRound | None = None
        self._number = number
        self._has_outlived = False
        self._lost: RoundLost | None = None
        self._wanted: ChangeWanted | None = None
        self._has_ended = False
        self._listeners: list[Callable[[News], None]] = []
        self._continues = False
        self._training = 0  # how many this process has begun
        self._has_completed = False  # all ranks have finished the last of them
        threading.Thread(target=self._read, name="ronde-membership", daemon=True).start()

    @property
    def number(self) -> int:
        """The round in which this worker has its place (-1: none yet)."""
        with self._changed:
            return self._number

    @property
    def newest(self) -> int:
        """The newest round of which the agent has told a place: `number`, or a later one to go to."""
        with self._changed:
            return self._number if self._newest is None else max(self._number, self._newest.number)

    @property
    def taken(self) -> PlaceInRound | None:
        """The place that `await_place` returned last; None if this worker still has that of its start."""
        with self._changed:
            return self._taken

    @property
    def change_wanted(self) -> str | None:
        """Why the worker should come to another round at its next commit; None if it need not."""
        with self._changed:
            if self._newest is not None and self._newest.number > self._number:
                return self._newest.reason
            if self._wanted is not None and self._wanted.number >= self._number:
                return self._wanted.reason
            return None

    @property
    def continues(self) -> bool:
        """Whether this process has announced that it survives the end of a round."""
        with self._changed:
            return self._continues

    @property
    def has_outlived(self) -> bool:
        """Whether this process has had a place in an earlier round."""
        with self._changed:
            return self._has_outlived

    @property
    def training(self) -> int:
        """The number of the last training that this process has begun, from 1; 0 before the first one."""
        with self._changed:
            return self._training

    @property
    def over(self) -> str | None:
        """Why the present round is over, because it has lost a member or a later one has begun; None if it is not."""
        with self._changed:
            if self._lost is not None and self._lost.number >= self._number:
                return self._lost.reason
            if self._newest is not None and self._newest.number > self._number:
                return self._newest.reason or f"round {self._newest.number} has begun"
            return None

    @property
    def lost(self) -> str | None:
        """Which member the present round has lost; None if it has lost none."""
        with self._changed:
            is_lost = self._lost is not None and self._lost.number >= self._number
            return self._lost.reason if is_lost and self._lost is not None else None

    def listen(self, listener: Callable[[News], None]) -> None:
        """Call `listener` in the reading thread for each message, but `ChangeWanted`, that comes from now on."""
        with self._changed:
            self._listeners.append(listener)

    def on_lost(self, callback: Callable[[RoundLost], None]) -> None:
        """Call `callback` in the reading thread for each `RoundLost`; now, if the present round is lost already."""
        self.listen(lambda news: callback(news) if isinstance(news, RoundLost) else None)
        with self._changed:
            lost, number = self._lost, self._number
        if lost is not None and lost.number >= number:
            callback(lost)

    def announce_continues(self) -> None:
        """Tell the agent that this process survives the end of a round from now on. A second call does nothing."""
        with self._changed:
            has_announced, self._continues = self._continues, True
            if not has_announced:
                self._training, self._has_completed = self._training + 1, False
        if not has_announced:
            self._send(Continues())

    def announce_completed(self) -> None:
        """Tell the agent that all ranks have finished. From now on this process need not survive."""
        with self._changed:
            self._continues = self._has_completed = False
        self._send(Completed(self._training))

    def await_place_or_end(self) -> PlaceInRound | None:
        """Return the next place as `await_place` does; None if all ranks have finished the training.

        For a process that has finished its part, and has lost the others while it waited for theirs.
        """
        before = self.number
        self._send(Awaits(before))
        with self._changed:
            self._changed.wait_for(lambda: self._has_completed or self._has_ended or self._is_after(before))
            if self._has_completed:
                return None
        return self.await_place(before)

    def await_place(self, after: int | None = None, timeout_ns: int | None = None) -> PlaceInRound:
        """Return the newest place in a round later than `after`, and make its variables those of this process.

        `after` (the present round): the round whose world this process has left. Raises PeerLostError if the agent
        ends, TimeoutError after `timeout_ns` (None: the agent ends the wait).
        """
        before = self.number if after is None else after
        self._send(Awaits(before))
        began_ns = time.monotonic_ns()
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._has_ended or self._is_after(before),
                None if timeout_ns is None else timeout_ns / 1e9,
            )
            if not self._is_after(before):
                if is_there:
                    raise PeerLostError(
                        "the agent of this worker has ended, so the worker gets no place in a new round: look at the "
                        "last output of `ronde run` on this host"
                    )
                raise TimeoutError(
                    f"this worker got no place in a round after {before} from its agent: look at the agent's output",
                    "membership",
                    time.monotonic_ns() - began_ns,
                )
            assert self._newest is not None
            place, previous = self._newest, self._taken
            self._has_outlived = self._has_outlived or self._number != NO_ROUND
            self._taken, self._number = place, place.number
        _apply(place, previous)
        return place

    def close(self) -> None:
        """End the reading thread and close the channel."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _is_after(self, number: int) -> bool:
        return self._newest is not None and self._newest.number > number

    def _send(self, message: FromWorker) -> None:
        with contextlib.suppress(OSError):  # the agent's end shows when this worker waits
            self._socket.send(_encode(message), socket.MSG_NOSIGNAL)

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_BYTES)
                message = FROM_AGENT.decode(data) if data else None
            except ConnectionResetError:  # the agent ended with messages unread; its own may follow
                continue
            except ProtocolError as error:
                _log.warning("the channel of this worker to its agent ends: %s", error)
                message = None
            except OSError:
                message = None
            if message is None:
                break
            self._note(message)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._socket.close()

    def _note(self, message: FromAgent) -> None:
        with self._changed:
            match message:
                case PlaceInRound():
                    if self._newest is None or message.number > self._newest.number:
                        self._newest = message
                case RoundLost():
                    self._lost = message
                case ChangeWanted():
                    self._wanted = message
                case TrainingCompleted(training):  # a late one is of an earlier training
                    self._has_completed = self._continues and training == self._training
            listeners = [] if isinstance(message, ChangeWanted) else list(self._listeners)
            self._changed.notify_all()
        for listener in listeners:
            assert not isinstance(message, ChangeWanted)
            try:
                listener(message)
            except Exception:  # the next messages matter more
                _log.exception("a listener for news of the membership failed")


def _apply(place: PlaceInRound, previous: PlaceInRound | None) -> None:
    """Make the variables of the place those of this process, instead of those of the previous place."""
    for name in (previous.environment.keys() if previous else set()) - place.environment.keys():
        set_variable(name, None)
    for name, value in place.environment.items():
        set_variable(name, value)
    set_variable(ROUND, str(place.number))


class _Own:
    """The channel of this process, found once."""

    pid = 0
    membership: Membership | None = None
    lock = threading.Lock()


def membership() -> Membership | None:
    """Return the channel of this process to its agent; None without an agent that has one, and in a forked child."""
    with _Own.lock:
        # A process without a channel may be a template, whose forked children get one each.
        if _Own.membership is None and (found := _open()) is not None:
            _Own.pid, _Own.membership = os.getpid(), found
        return _Own.membership if _Own.pid == os.getpid() else None


def _open() -> Membership | None:
    found = environment()
    identity = found.get(VARIABLE, "")
    try:
        fd = int(identity.partition(":")[0])
        if _identify(fd) != identity:
            return None
        os.set_inheritable(fd, False)
    except (ValueError, OSError):
        return None
    number = found.get(ROUND, "")
    return Membership(fd, int(number) if number.isdecimal() else NO_ROUND)


def _forget_in_child() -> None:
    _Own.lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_in_child)
