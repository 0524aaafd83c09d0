"""`ronde.record`: writes an exception that leaves a function into the error file that the launcher named."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ronde.environment import environment
from ronde.process import uncaught
from ronde.process.error_file import ERROR_FILE, write_error_file

__all__ = ["ErrorHandler", "record"]

P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes an exception into the error file that the launcher has named, if one has.

    What `record` uses; derive from it to do something else. torch's class of that name has the same two methods.
    """

    def initialize(self) -> None:
        """Prepare for exceptions to come: a fatal signal prints where each thread was."""
        import faulthandler  # only workers that record need it

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, ValueError, RuntimeError, AttributeError):
            pass  # standard error is not a file

    def record_exception(self, error: BaseException) -> None:
        """Write the error file. What goes wrong with it is printed: the exception itself matters more."""
        path = environment().get(ERROR_FILE)
        if not path:
            return
        try:
            write_error_file(path, error)
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
    """Return a function that reports an exception of `fn` to the launcher, which names it as the cause of a failure.

        @ronde.record
        def main(): ...

    The exception continues as before; SystemExit is not reported. Without a launcher there is no report. Scripts that
    call `ronde.init()` do not need it. Raises no error.

    Args:
        fn: the main function of a script (None: return a decorator, for `@ronde.record(error_handler=...)`).
        error_handler: what to do with an exception (None: write the launcher's error file).
    """
    if fn is None:
        return functools.partial(record, error_handler=error_handler)
    handler = error_handler or ErrorHandler()

    @functools.wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        handler.initialize()
        uncaught.announce_uncaught()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            handler.record_exception(error)
            uncaught.mark_recorded(error)
            raise

    return recorded
