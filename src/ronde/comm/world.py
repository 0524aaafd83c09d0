"""The communicator of all ranks: how a process joins it, asks about it, and leaves it.

`init` determines the rank of this process (from the environment of `ronde run`, torchrun, mpirun or srun, or from its
arguments), meets the other ranks at the store, and connects the world. A process has one world at a time; all ranks
may call `shutdown` and `init` again. A worker that outlives its round (`process/membership_channel`) then joins the
world of the newest round.

From `init` on, Ronde's log lines name the rank. They are written below the logger "ronde": to the program's handlers,
or to stderr if the program has none. The root logger belongs to the program, and Ronde never changes it. A handler that
the program installs later, at the root or at "ronde", takes over.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from ronde import settings
from ronde.comm.communicator import Communicator, alive
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.identity import Identity, MeetingPoint, identify, interpret_init_arguments
from ronde.comm.meeting import Meeting, meet, surroundings
from ronde.comm.world_attempt import EpochOverError, WorldAttempt, contest_rank
from ronde.comm.world_epochs import Epoch
from ronde.errors import NotInitializedError, PeerLostError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.net.host import host_name
from ronde.process import uncaught
from ronde.process.membership_channel import NO_ROUND, News, RoundLost, membership
from ronde.settings import Settings

__all__ = [
    "await_next_round",
    "cross_rank",
    "cross_size",
    "has_joined",
    "init",
    "is_homogeneous",
    "is_initialized",
    "later_round",
    "local_rank",
    "local_size",
    "meeting",
    "rank",
    "shutdown",
    "size",
    "world",
]

VISIT_NS = 2 * 10**9  # how long to look for another process of this rank

_log = logging.getLogger(__name__)


class _JobProcess:
    """The state of this process in its job; one instance, below."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as in a new process or a forked child."""
        self.pid = os.getpid()
        self.world: Communicator | None = None
        self.wanted: Settings | None = None  # the settings of the world
        # Kept after shutdown, for the next `init`: a store that closed in between would look lost to the other ranks.
        self.meeting: Meeting | None = None
        self.point: MeetingPoint | None = None
        self.epoch: Epoch | None = None  # the last one to which this process has come
        self.has_formed = False  # whether that has become a world
        self.round = NO_ROUND  # in which it has met the others
        self.is_joining = False
        self.listens = False  # to the news of the membership


_process = _JobProcess()


def init(
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    *,
    init_method: str | None = None,
    world_size: int | None = None,
    **overrides: object,
) -> None:
    """Join the world, and return when all ranks have joined. All ranks call it; a second call does nothing.

    A second call with other arguments than the first one raises UsageError. Without arguments, rank and size come from
    the launcher's environment; without a launcher, the world has one rank.
    `rank`, `size` (or `world_size`): instead of a launcher. `store`: where the ranks then meet, `tcp:host:port` or
    `unix:@name`, which rank 0 serves, or `file:/path`. `init_method`: the same in torch.distributed's form, `env://`,
    `tcp://host:port` or `file:///path` (see comm/identity). `overrides`: settings by name (docs/settings.md), which
    override `RONDE_*` variables. Raises UsageError for invalid arguments, TimeoutError that names the missing ranks,
    PeerLostError if another rank raises in this call, AuthenticationError.
    """
    _forget_if_forked()
    if _process.world is not None:
        _check_second_call(_process.world, rank, size if size is not None else world_size, overrides)
        return
    uncaught.announce_uncaught()
    _take_place()
    environ = settings.environment()
    given = interpret_init_arguments(init_method, rank, size, world_size, store, environ)
    identity = identify(given.environ, surroundings(environ), given.rank, given.size, given.store)
    _log_as_rank(identity.rank)
    wanted = settings.resolve(environ, **overrides)
    deadline_ns = time.monotonic_ns() + wanted.start_timeout_ns
    _apply_log_settings(wanted, identity.rank)
    if ignored := settings.ignored_horovod_variables(environ):
        _log.info("these Horovod variables have no effect in Ronde: %s", ", ".join(ignored))
    if identity.meeting is None:
        _process.world = CommunicatorFactory(wanted, JobKey.generate()).make_world(
            0, 1, lambda mine: [mine], "world", deadline_ns
        )
    else:
        is_launchers = (given.rank, given.size, given.store) == (None, None, None)
        _process.is_joining = True
        try:
            _process.world = _join(identity, identity.meeting, wanted, deadline_ns, is_launchers)
        except Exception:
            _check_round()
            raise
        finally:
            _process.is_joining = False
    _process.wanted = wanted


# The rounds of a job, for a worker that can outlive one


def _take_place() -> None:
    """Go to the newest round of which the agent of this worker has told a place; a spare waits for its first one."""
    if (mine := membership()) is None:
        return
    if not _process.listens:
        _process.listens = True
        mine.listen(_hear_news)
    if mine.number == NO_ROUND:
        mine.announce_continues()
    if mine.number == NO_ROUND or mine.newest > mine.number:
        mine.await_place()
    if mine.number != _process.round:
        _forget_meeting()
        _process.round = mine.number


def later_round() -> int:
    """Return the number of this worker's round, 0 if it is the one in which the process was started."""
    mine = membership()
    return 0 if mine is None or mine.taken is None else mine.number


def await_next_round(began_ns: int) -> bool:
    """Wait for the place in a later round, after a failure in `init`; return False if this worker has no later one.

    `began_ns`: when `init` began; it waits until the start timeout. Raises PeerLostError if the agent ends.
    """
    mine = membership()
    if mine is None or not mine.continues:
        return False
    left_ns = began_ns + settings.resolve(settings.environment()).start_timeout_ns - time.monotonic_ns()
    try:
        mine.await_place(timeout_ns=max(0, left_ns))
    except TimeoutError:
        return False
    return True


def _forget_meeting() -> None:
    """Forget where the ranks of the last round have met: each round has a new store."""
    if _process.meeting is not None:
        _process.meeting.close()
    _process.meeting = _process.point = _process.epoch = None
    _process.has_formed = False


def _check_round() -> None:
    """Raise PeerLostError if the round of this worker is over."""
    mine = membership()
    if mine is not None and mine.continues and (reason := mine.over):
        raise PeerLostError(f"round {mine.number} of the job is over: {reason}")


def _hear_news(news: News) -> None:
    """Wake this process's other threads, which wait for the ranks of a round that is over."""
    meeting, mine = _process.meeting, membership()
    if mine is None or not mine.continues or not mine.over:
        return
    if isinstance(news, RoundLost):
        for communicator in _open_communicators():
            communicator.abort(f"round {news.number} of the job is over: {news.reason}")
    if _process.is_joining and meeting is not None:
        meeting.store.close()


def _open_communicators() -> list[Communicator]:
    while True:
        try:
            return list(alive)
        except RuntimeError:  # another thread has just made one
            pass


def _check_second_call(
    joined: Communicator, rank: int | None, size: int | None, overrides: Mapping[str, object]
) -> None:
    """Raise UsageError if a second call of `init` wants another world than the first one has made."""
    assert _process.wanted is not None
    wanted = settings.resolve(settings.environment(), **overrides)
    pairs = [("rank", joined.rank, rank), ("size", joined.size, size)]
    pairs += [
        (name, getattr(_process.wanted, name), getattr(wanted, name))
        for name, value in overrides.items()
        if value is not None
    ]
    for name, first, second in pairs:
        if second is not None and second != first:
            raise UsageError(
                f"ronde.init() was called again with {name}={second!r}, but the world that this process has joined has "
                f"{name}={first!r}: call ronde.shutdown() first, or leave {name} out"
            )


def shutdown() -> None:
    """Leave the world; calls of other ranks that need this rank fail. Does nothing before `init`."""
    if _process.pid != os.getpid() or _process.world is None:
        return
    leaving, _process.world = _process.world, None
    leaving.shutdown()


def keep_left_world(left: Communicator) -> None:
    """Keep the rank and size of a world that this process has left; its operations raise. None may be joined."""
    if _process.world is None:
        _process.world = left


def is_initialized() -> bool:
    """Return whether this process, or its parent before the fork, has joined the world and not left it.

    So `rank() if is_initialized() else 0` in a worker of a DataLoader is the rank of its parent. Raises no error.
    """
    return _process.world is not None


def has_joined() -> bool:
    """Return whether this process, not its parent, has joined the world and not left it."""
    return is_initialized() and _process.pid == os.getpid()


def world() -> Communicator:
    """Return the communicator of all ranks. Raises NotInitializedError before `init`."""
    asked = _world_of_parent()
    if _process.pid != os.getpid():
        raise NotInitializedError("this process was forked after ronde.init(); call it in the child instead")
    return asked


def _world_of_parent() -> Communicator:
    """Return the same, or in a forked child its parent's, for queries of rank and size only."""
    if _process.world is None:
        raise NotInitializedError("Ronde is not initialized in this process: call ronde.init() first")
    return _process.world


# Rank and size as functions. In a forked child, such as a worker of a DataLoader, they return those of its parent, so
# that the worker can choose its rank's part of the data.


def rank() -> int:
    """Return the rank of this process, from 0 to size() - 1. Raises NotInitializedError before `init`."""
    return _world_of_parent().rank


def size() -> int:
    """Return the number of processes. Raises NotInitializedError before `init`."""
    return _world_of_parent().size


def local_rank() -> int:
    """Return the rank of this process among those of its host. Raises NotInitializedError before `init`."""
    return _world_of_parent().local_rank


def local_size() -> int:
    """Return the number of processes of this host. Raises NotInitializedError before `init`."""
    return _world_of_parent().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a process with this local rank.

    Raises NotInitializedError before `init`.
    """
    return _world_of_parent().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank. Raises NotInitializedError before `init`."""
    return _world_of_parent().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes. Raises NotInitializedError before `init`."""
    return _world_of_parent().is_homogeneous


def meeting() -> Meeting | None:
    """Return where the ranks of the world have met; None if this process is alone, or not in a world."""
    return _process.meeting if _process.pid == os.getpid() else None


def _forget_if_forked() -> None:
    """Reset the state in a forked child, which has its parent's connections but is not a rank."""
    if _process.pid != os.getpid():
        _process.reset()


def _join(
    identity: Identity, point: MeetingPoint, wanted: Settings, deadline_ns: int, is_launchers: bool
) -> Communicator:
    """Return the world. `deadline_ns` is that of all steps, from the store to shared memory.

    `is_launchers`: whether the launcher describes the world, and not the program.
    """
    began_ns = time.monotonic_ns()
    while True:
        attempt = _begin_attempt(identity, point, wanted, began_ns, deadline_ns)
        meeting = _process.meeting
        assert meeting is not None
        try:
            if is_launchers:
                uncaught.announce_joining(identity.size, attempt.epoch.number)
            meeting.find_address(wanted)
            made = CommunicatorFactory(wanted, meeting.key, meeting.address).make_world(
                identity.rank,
                identity.size,
                attempt.exchange,
                attempt.name,
                deadline_ns,
                attempt.check,
            )
        except BaseException as error:
            if is_launchers:
                uncaught.announce_joined()
            cause = attempt.end(error)
            if isinstance(cause, EpochOverError):
                continue
            if cause is error:
                raise
            raise cause from None
        if is_launchers:
            uncaught.announce_joined()
        _process.has_formed = True
        if identity.rank == 0:
            try:
                attempt.delete_earlier_epochs()
            except BaseException:
                made.shutdown()
                raise
        return made


def _begin_attempt(
    identity: Identity, point: MeetingPoint, wanted: Settings, began_ns: int, deadline_ns: int
) -> WorldAttempt:
    """Come to an epoch at the meeting point; meet there first, unless this process has."""
    if _process.meeting is not None and _process.point == point:
        try:
            return _come_to_epoch(identity, _process.meeting, began_ns, deadline_ns)
        except PeerLostError:
            if point.served_by == identity.rank:
                raise
            # A client that has lost its store once stays so. Another process may serve it now, in the place of a lost
            # rank, or the launcher again.
            left_ns = max(1, deadline_ns - time.monotonic_ns())
            wanted = dataclasses.replace(wanted, start_timeout_ns=left_ns)
    if _process.meeting is not None:
        _process.meeting.close()
        _process.meeting = None
    try:
        _process.meeting, _process.point = meet(point, identity.rank, wanted, _check_round), point
    except UsageError:
        if point.served_by == identity.rank:
            _contest_rank(identity, point, wanted)
        raise
    _check_round()  # news that came before there was a meeting have closed nothing
    return _come_to_epoch(identity, _process.meeting, began_ns, deadline_ns)


def _come_to_epoch(identity: Identity, meeting: Meeting, began_ns: int, deadline_ns: int) -> WorldAttempt:
    """Come to the next epoch of the meeting's store."""
    attempt = WorldAttempt(
        meeting.store,
        identity.rank,
        identity.size,
        began_ns,
        deadline_ns,
        _process.epoch,
        meeting.last_refusal,
        _process.has_formed,
    )
    _process.epoch, _process.has_formed = attempt.epoch, False
    return attempt


def _contest_rank(identity: Identity, point: MeetingPoint, wanted: Settings) -> None:
    """Raise UsageError, also on all other ranks, if another process serves the store because it has the same rank."""
    visitor = replace(point, served_by=None)
    try:
        meeting = meet(visitor, identity.rank, dataclasses.replace(wanted, start_timeout_ns=VISIT_NS))
    except RondeError:  # another program has the address
        return
    try:
        contest_rank(meeting.store, identity.rank, identity.size)
    finally:
        meeting.close()


def _end() -> None:
    """Leave the world when the process ends, and close what a next `init` would need."""
    shutdown()
    if _process.pid == os.getpid() and _process.meeting is not None:
        with suppress(OSError):  # a program may have closed all descriptors
            _process.meeting.close()


atexit.register(_end)


# Log lines

_ours = logging.getLogger("ronde")


class _Stderr(logging.Handler):
    """Writes lines that name the rank and its host, unless the program has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or logging.getLogger().handlers or _ours.handlers != [self]:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # in one piece, because other ranks write there, too
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_stderr = _Stderr()


def _log_as_rank(rank: int) -> None:
    """Name this rank in every log line from now on."""
    _set_format(rank, hide_time=False)
    if _stderr not in _ours.handlers and not _ours.hasHandlers():
        _ours.addHandler(_stderr)


def _apply_log_settings(wanted: Settings, rank: int) -> None:
    """Log from the level of the settings on, in their format."""
    _ours.setLevel(wanted.log_level.upper())
    _set_format(rank, wanted.log_hide_time)


def _set_format(rank: int, hide_time: bool) -> None:
    time = "" if hide_time else "%(asctime)s.%(msecs)03d "
    host = host_name().replace("%", "%%")
    line = f"{time}%(levelname)s rank {rank} on {host}: %(name)s: %(message)s"
    _stderr.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
