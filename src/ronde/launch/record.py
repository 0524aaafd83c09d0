"""Error files: what a worker writes about the exception that ends it, and what its launcher reads.

The format is that of torch's `@record`, so either side may be torch's:

    {"message": {"message": "ValueError: ...", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "seconds"}}}
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from ronde.settings import environment

__all__ = ["ErrorHandler", "ErrorReport", "read_error_file", "record"]

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES = 1 << 20  # of an error file that is read


class ErrorHandler:
    """Writes an exception into the error file that the launcher has named, if one has.

    What `record` uses; derive from it to do something else. torch's class of that name has the same two methods.
    """

    def initialize(self) -> None:
        """Prepare for exceptions to come: a fatal signal prints where each thread was."""
        import faulthandler  # only in a worker that records

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # standard error is no file

    def record_exception(self, error: BaseException) -> None:
        """Write the error file. What goes wrong with it is printed: the exception itself matters more."""
        path = environment().get("TORCHELASTIC_ERROR_FILE")
        if not path:
            return
        text = "".join(traceback.format_exception(error))
        info = {"py_callstack": text, "timestamp": str(int(time.time())), "timestamp_ns": time.time_ns()}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
        try:
            with open(path, "w") as file:
                json.dump({"message": message}, file)
        except OSError as problem:
            print(f"ronde: cannot write the error file {path}: {problem.strerror}", file=sys.stderr)


@overload
def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R]: ...


@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(
    fn: Callable[..., Any] | None = None, error_handler: ErrorHandler | None = None
) -> Callable[..., Any]:
    """Make an exception that leaves `fn` known to the launcher, which then names it as the cause of the failure.

    For the main function of a script: `@ronde.record`, or `@ronde.record(error_handler=...)`. The exception goes on as
    before; SystemExit is none. Without a launcher nothing else happens.
    """
    if fn is None:
        return functools.partial(record, error_handler=error_handler)
    handler = error_handler or ErrorHandler()

    @functools.wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            handler.record_exception(error)
            raise

    return recorded


@dataclass(frozen=True)
class ErrorReport:
    """What an error file says: `message` is the exception, `time_ns` when it was raised, since 1970."""

    message: str
    traceback: str
    time_ns: int


def read_error_file(path: str) -> ErrorReport | None:
    """Return what the file says; None if there is none. It is a worker's: whatever it contains, nothing is raised."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES)
            written_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    if not text:
        return None
    try:
        message = json.loads(text)["message"]
        if not isinstance(message, dict):
            return ErrorReport(str(message), "", written_ns)
        info = message.get("extraInfo", {})
        # torch writes whole seconds, which do not tell what came first.
        return ErrorReport(
            str(message["message"]),
            str(info.get("py_callstack", "")),
            int(info.get("timestamp_ns", written_ns)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ErrorReport("an error file that cannot be read", text.decode(errors="replace"), written_ns)
