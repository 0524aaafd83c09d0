"""The communicator of all ranks: how a process joins it, asks about it, and leaves it.

`init` determines the rank of this process (from the environment of `ronde run`, torchrun, mpirun or srun, or from its
arguments), meets the other ranks at the store, and connects the world. A process has one world at a time; all ranks may
call `shutdown` and `init` again.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import Counter
from contextlib import suppress

from ronde import settings
from ronde.comm import logs
from ronde.comm.bootstrap import exchange_through
from ronde.comm.communicator import Communicator
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.core.identity import Identity, MeetingPoint, identify
from ronde.core.init_method import interpret_init_arguments
from ronde.errors import NotInitializedError
from ronde.job_key import JobKey
from ronde.net.host import surroundings
from ronde.net.meeting import Meeting, meet, waiting_key, world_name
from ronde.process import uncaught
from ronde.settings import Settings

__all__ = ["has_joined", "init", "is_initialized", "meeting", "shutdown", "world", "world_of_parent"]

_log = logging.getLogger(__name__)


class _JobProcess:
    """The state of this process in its job; one instance, below."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as in a new process or a forked child."""
        self.pid = os.getpid()
        self.world: Communicator | None = None
        # Kept after shutdown, for the next `init`: a store that closed in between would look lost to the other ranks.
        self.meeting: Meeting | None = None
        self.point: MeetingPoint | None = None
        self.generation = 0
        self.joins: Counter[int] = (
            Counter()
        )  # by size: the worlds of the launcher that this process has joined


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

    Without arguments, rank and size come from the launcher's environment; without a launcher, the world has one rank.
    `rank`, `size` (or `world_size`): instead of a launcher. `store`: where the ranks then meet, `tcp:host:port` or
    `unix:@name`, which rank 0 serves, or `file:/path`. `init_method`: the same in torch.distributed's form, `env://`,
    `tcp://host:port` or `file:///path` (see core/init_method). `overrides`: settings by name (docs/settings.md), which
    override `RONDE_*` variables. Raises UsageError for invalid arguments, TimeoutError that names the missing ranks,
    AuthenticationError.
    """
    _forget_if_forked()
    if _process.world is not None:
        return
    uncaught.announce_uncaught()
    environ = settings.environment()
    wish = interpret_init_arguments(init_method, rank, size, world_size, store, environ)
    identity = identify(wish.environ, surroundings(environ), wish.rank, wish.size, wish.store)
    logs.log_as_rank(identity.rank)
    wanted = settings.resolve(environ, **overrides)
    deadline_ns = time.monotonic_ns() + wanted.start_timeout_ns
    logs.apply_log_settings(wanted, identity.rank)
    if ignored := settings.ignored_horovod_variables(environ):
        _log.info("these Horovod variables have no effect in Ronde: %s", ", ".join(ignored))
    if identity.meeting is None:
        _process.world = CommunicatorFactory(wanted, JobKey.generate()).make_world(
            0, 1, lambda mine: [mine], "world", deadline_ns
        )
    else:
        waiting = ""
        if (wish.rank, wish.size, wish.store) == (None, None, None):
            waiting = waiting_key(identity.size, _process.joins[identity.size])
            uncaught.announce_joining(identity.size)
            _process.joins[identity.size] += 1
        _process.world = _join(identity, identity.meeting, wanted, deadline_ns, waiting)


def shutdown() -> None:
    """Leave the world; calls of other ranks that need this rank fail. Does nothing before `init`."""
    if _process.pid != os.getpid() or _process.world is None:
        return
    leaving, _process.world = _process.world, None
    leaving.shutdown()


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
    asked = world_of_parent()
    if _process.pid != os.getpid():
        raise NotInitializedError("this process was forked after ronde.init(); call it in the child instead")
    return asked


def world_of_parent() -> Communicator:
    """Return the same, or in a forked child its parent's, for queries of rank and size only."""
    if _process.world is None:
        raise NotInitializedError("Ronde is not initialized in this process: call ronde.init() first")
    return _process.world


def meeting() -> Meeting | None:
    """Return where the ranks of the world have met; None if this process is alone, or not in a world."""
    return _process.meeting if _process.pid == os.getpid() else None


def _forget_if_forked() -> None:
    """Reset the state in a forked child, which has its parent's connections but is not a rank."""
    if _process.pid != os.getpid():
        _process.reset()


def _join(
    identity: Identity, point: MeetingPoint, wanted: Settings, deadline_ns: int, waiting: str
) -> Communicator:
    """Return the world. `deadline_ns` is that of all steps, from the store to shared memory.

    `waiting`: the key that tells agents which rank waits for the others; "" in a world that the program describes.
    """
    if _process.meeting is None or _process.point != point:
        if _process.meeting is not None:
            _process.meeting.close()
        _process.meeting, _process.point = meet(point, identity.rank, wanted), point
        _process.generation = 0
    meeting = _process.meeting
    purpose = world_name(_process.generation)
    left_ns = deadline_ns - time.monotonic_ns()
    exchange = exchange_through(
        meeting.store, purpose, identity.rank, identity.size, left_ns, meeting.last_refusal, waiting
    )
    _process.generation += 1
    factory = CommunicatorFactory(wanted, meeting.key, meeting.address)
    return factory.make_world(identity.rank, identity.size, exchange, purpose, deadline_ns)


def _end() -> None:
    """Leave the world when the process ends, and close what a next `init` would need."""
    shutdown()
    if _process.pid == os.getpid() and _process.meeting is not None:
        with suppress(OSError):  # a program may have closed all descriptors
            _process.meeting.close()


atexit.register(_end)
