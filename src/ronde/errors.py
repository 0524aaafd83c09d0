"""Everything Ronde raises on purpose.

RondeError
├── UsageError (ValueError)          this process asked for something that makes no sense; nothing was sent
│   ├── NotInitializedError          a call that needs `ronde.init()` first
│   └── UnsupportedError             an operation that does not exist for these arguments (also NotImplementedError)
├── MismatchError (RuntimeError)     ranks made different calls; names both values and both ranks
├── PeerError (RuntimeError)         the world is no longer whole; everything here can be recovered from
│   ├── PeerLostError                a rank died, left, or cannot be reached: `.rank`, `.host`
│   ├── AbortedError                 a rank gave up on purpose: `.rank`, `.host`
│   ├── TimeoutError                 waited longer than a setting allows: `.operation`, `.waited_ns`, `.missing`
│   └── RemoteError                  user code failed on another rank: `.rank`, `.traceback_text`, `.exit_codes`
├── StaleRoundError (RuntimeError)   the job has gone on without this process; it must not save anything any more
└── ProtocolError (RuntimeError)     the other end does not speak our language
    ├── AuthenticationError          wrong or missing job key
    └── VersionError                 another, incompatible version of Ronde
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping

__all__ = [
    "AbortedError",
    "AuthenticationError",
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
]


class RondeError(Exception):
    """The root of all errors that Ronde raises on purpose."""


class UsageError(RondeError, ValueError):
    """This process asked for something that makes no sense. Nothing was sent; the next call works."""


class NotInitializedError(UsageError):
    """A call that needs `ronde.init()` first."""


class UnsupportedError(UsageError, NotImplementedError):
    """The operation does not exist for these arguments, such as a reduce-scatter with Adasum.

    It is a RuntimeError too, which is what scripts for Horovod expect in these places.
    """


class MismatchError(RondeError, RuntimeError):
    """Ranks made different calls where they must make the same one; names both calls and both ranks."""


class PeerError(RondeError, RuntimeError):
    """The world is no longer whole. Everything a program can recover from derives from this."""


class PeerLostError(PeerError):
    """A rank died, left, or cannot be reached any more.

    `rank` is its rank in the communicator that raised (-1 if unknown), `host` the name of its machine.
    """

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.host)


class AbortedError(PeerError):
    """A rank called `abort()`: `rank` and `host` say who."""

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.host)


class TimeoutError(PeerError, builtins.TimeoutError):
    """Waited longer than a setting allows.

    `operation` names what was waited for, `waited_ns` how long (nanoseconds), `missing` the ranks that did not come.
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
    """User code failed on another rank; `traceback_text` is the traceback as it was printed there.

    `exit_codes`: of all ranks that failed by themselves, as far as this is the error of a whole job; minus the signal
    where one killed it.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        traceback_text: str = "",
        exit_codes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback_text = traceback_text
        self.exit_codes = dict(exit_codes or {})

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.rank, self.traceback_text, self.exit_codes)


class StaleRoundError(RondeError, RuntimeError):
    """The job has gone on in a later round, without this process, which should save nothing any more and end."""


class ProtocolError(RondeError, RuntimeError):
    """The other end of a connection does not speak our language."""


class AuthenticationError(ProtocolError):
    """The other end of a connection does not know the job key, or we do not know its."""


class VersionError(ProtocolError):
    """The other end runs an incompatible version of Ronde."""
