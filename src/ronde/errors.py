"""The errors that Ronde raises on purpose.

RondeError
├── UsageError (ValueError)          the arguments of a call are invalid; nothing was sent, or it says so
│   ├── NotInitializedError          a call that needs `ronde.init()` first
│   └── UnsupportedError             an operation that does not exist for these arguments (also NotImplementedError)
├── CollectiveError (RuntimeError)   what ranks do together has failed; Horovod's name is HorovodInternalError
│   ├── MismatchError                ranks made different calls; names both values and both ranks
│   └── PeerError                    another rank is lost or has failed; a program can recover
│       ├── PeerLostError            a rank died, left, or cannot be reached: `.rank`, `.host`
│       ├── AbortedError             a rank called `abort()`: `.rank`, `.host`
│       ├── TimeoutError             a wait exceeded a setting: `.operation`, `.waited_ns`, `.missing`
│       └── RemoteError              user code failed on another rank: `.rank`, `.traceback_text`, `.exit_codes`
│           └── WorkerError          a worker of a job on a cluster failed: also `.host`, `.exit_code`, `.last_lines`
├── StaleRoundError (RuntimeError)   the job has continued without this process, which must not save
└── ProtocolError (RuntimeError)     the other end does not speak Ronde's protocol
    ├── AuthenticationError          wrong or missing job key
    └── VersionError                 another, incompatible version of Ronde
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "CollectiveError",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "PeerLostError",
    "ProtocolError",
    "RemoteError",
    "RondeError",
    "StaleRoundError",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "WorkerError",
]


class RondeError(Exception):
    """The base of all errors that Ronde raises on purpose."""


class UsageError(RondeError, ValueError):
    """The arguments of this call are invalid. Nothing was sent, unless the error says that the other ranks have their
    results; the next call works.
    """


class NotInitializedError(UsageError):
    """A call before `ronde.init()` or after `ronde.shutdown()`."""


class UnsupportedError(UsageError, NotImplementedError):
    """The operation does not exist for these arguments, such as a reduce-scatter with Adasum.

    It is also a RuntimeError, which scripts for Horovod expect.
    """


class CollectiveError(RondeError, RuntimeError):
    """What ranks do together has failed: their calls differ, or a rank is lost or has failed.

    The base of MismatchError and PeerError. `ronde.torch` also has it under Horovod's name, HorovodInternalError.
    """


class MismatchError(CollectiveError):
    """Ranks made different calls instead of the same one. The message names both calls and both ranks."""


class PeerError(CollectiveError):
    """Another rank is lost or has failed. The base of all errors from which a program can recover."""


class PeerLostError(PeerError):
    """A rank died, left, or cannot be reached.

    Args:
        message: The text of the error.

    Attributes:
        rank: Its rank in the communicator that raised the error (-1: unknown).
        host: The name of its machine ("": unknown).
    """

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.host)


class AbortedError(PeerError):
    """A rank called `abort()`.

    Args:
        message: The text of the error.

    Attributes:
        rank: Its rank in the communicator that raised the error (-1: unknown).
        host: The name of its machine ("": unknown).
    """

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.host)


class TimeoutError(PeerError, builtins.TimeoutError):
    """A wait exceeded the limit of a setting.

    Args:
        message: The text of the error.

    Attributes:
        operation: The name of the operation ("": unknown).
        waited_ns: The time waited, in nanoseconds (0: unknown).
        missing: The missing ranks (empty: unknown).
    """

    def __init__(
        self, message: str, operation: str = "", waited_ns: int = 0, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.waited_ns = waited_ns
        self.missing = missing

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.operation, self.waited_ns, self.missing)


class RemoteError(PeerError):
    """User code failed on another rank.

    Args:
        message: The text of the error.

    Attributes:
        rank: The rank (-1: unknown).
        traceback_text: The traceback, as it was printed there ("": none).
    """

    def __init__(self, message: str, rank: int = -1, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.traceback_text)


class WorkerError(RemoteError):
    """The first failure of a job, which has ended the job: a worker's, or on a cluster that of the cluster itself.

    Args:
        message: The text of the error.

    Attributes:
        rank: The rank of the worker; -1 if none failed before the job did.
        host: The name of its machine.
        exit_code: The worker's exit code, or the negative number of the signal that killed it; that of the job if no
            worker failed.
        traceback_text: The traceback of its exception, or "".
        last_lines: The last lines that it printed.
        has_lost_task: Whether no worker failed, but the cluster lost a task of the running job, with its machine for
            example, so that another run may succeed.
        exit_codes: The exit codes, by rank, of all workers that are known to have failed and were not ended by the
            launcher.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        host: str = "",
        exit_code: int = 0,
        traceback_text: str = "",
        last_lines: Sequence[str] = (),
        has_lost_task: bool = False,
        exit_codes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(message, rank, traceback_text)
        self.host = host
        self.exit_code = exit_code
        self.last_lines = tuple(last_lines)
        self.has_lost_task = has_lost_task
        self.exit_codes = dict(exit_codes or ({rank: exit_code} if rank >= 0 else {}))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (
            *(self.args[0], self.rank, self.host, self.exit_code, self.traceback_text),
            *(self.last_lines, self.has_lost_task, self.exit_codes),
        )


class StaleRoundError(RondeError, RuntimeError):
    """The job has continued in a later round without this process. It must not save anything, and should end."""


class ProtocolError(RondeError, RuntimeError):
    """The other end of a connection does not speak Ronde's protocol."""


class AuthenticationError(ProtocolError):
    """The two ends of a connection have different job keys."""


class VersionError(ProtocolError):
    """The other end runs an incompatible version of Ronde."""
