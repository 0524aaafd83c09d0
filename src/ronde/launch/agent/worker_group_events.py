"""The events that a `WorkerGroup` handles, and the effects that its shell performs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Effect",
    "Event",
    "Exited",
    "Finish",
    "GroupTimer",
    "InterruptGroup",
    "NotStarted",
    "SetGroupTimer",
    "SignalWorkers",
    "Started",
    "StopGroup",
    "Vacated",
    "WorkerJoined",
    "WorkerJoins",
    "WorkerLeft",
    "WorkerMissed",
    "WorkerRaised",
    "WorkerReplaced",
]


@dataclass(frozen=True)
class Started:
    """The worker's process runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class NotStarted:
    """The worker's process cannot start; the shell starts no further ones."""

    rank: int
    problem: str


@dataclass(frozen=True)
class Exited:
    """The worker's own process ended.

    `returncode`: its exit code, or minus the signal that killed it. `blames_peer`: its error reports a lost rank.
    `leftovers`: processes of its group are left, whose end `Vacated` reports. `raised_ns`: the time of the exception
    that ended it, on a clock that all workers share; 0: unknown.
    """

    rank: int
    returncode: int
    blames_peer: bool = False
    leftovers: bool = False
    raised_ns: int = 0


@dataclass(frozen=True)
class WorkerRaised:
    """The worker has announced an uncaught exception and is about to end, which may take long.

    `what`: the exception; the rest is as in `Exited`.
    """

    rank: int
    what: str
    blames_peer: bool = False
    raised_ns: int = 0


@dataclass(frozen=True)
class WorkerLeft:
    """The worker has left the other ranks, and may take long to end. Its exit code is not known yet."""

    rank: int


@dataclass(frozen=True)
class WorkerJoins:
    """The worker has come to an epoch of the world of all ranks. It cannot have joined before all of them have come."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class WorkerJoined:
    """The worker has joined the world of the epoch to which it came, or has given up."""

    rank: int


@dataclass(frozen=True)
class WorkerReplaced:
    """The worker has lost its connections to the other ranks without leaving them: its process runs another program.

    `program`: the words that started it.
    """

    rank: int
    program: str


@dataclass(frozen=True)
class WorkerMissed:
    """A rank of another node waits in `ronde.init` for this worker, which has ended with exit code 0.

    `by`: the rank that waits. The only event that may come after `Finish`: it takes back one of exit code 0.
    """

    rank: int
    by: int


@dataclass(frozen=True)
class Vacated:
    """The last process of an exited worker's group is gone."""

    rank: int


@dataclass(frozen=True)
class InterruptGroup:
    """The supervisor received a signal that ends the job."""

    signum: int


@dataclass(frozen=True)
class StopGroup:
    """The supervisor ends these workers; `at_once`: by SIGKILL, without SIGTERM."""

    reason: str
    at_once: bool = False


@dataclass(frozen=True)
class GroupTimer:
    """The time of the last `SetGroupTimer` has come, or the shell woke up early."""


Event = (
    Started
    | NotStarted
    | WorkerRaised
    | WorkerJoins
    | WorkerJoined
    | WorkerLeft
    | WorkerMissed
    | WorkerReplaced
    | Exited
    | Vacated
    | InterruptGroup
    | StopGroup
    | GroupTimer
)


@dataclass(frozen=True)
class SignalWorkers:
    """Send the signal to all processes of these ranks' groups; `reason` is for the user."""

    ranks: tuple[int, ...]
    signum: int
    reason: str


@dataclass(frozen=True)
class SetGroupTimer:
    """Send `GroupTimer` at this time; it replaces any earlier one."""

    at_ns: int


@dataclass(frozen=True)
class Finish:
    """The run is over; the report shows the last output of `failed_rank`.

    After a `Finish` with exit code 0, a `WorkerMissed` may cause a second one, with the failure.
    """

    exit_code: int
    reason: str
    failed_rank: int | None = None


Effect = SignalWorkers | SetGroupTimer | Finish
