"""Calls by programs for Horovod: functions for a cluster's workers, and the words of errors.

Unpickling a function imports `ronde.compat` in the worker first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from ronde.errors import TimeoutError, WorkerError

__all__ = ["with_horovod", "with_horovods_words"]

R = TypeVar("R")


def with_horovod(fn: Callable[..., R]) -> Callable[..., R]:
    """Return a function like `fn` for which, where it is unpickled, Ronde answers for Horovod."""
    return partial(_call, fn)


@contextmanager
def with_horovods_words(awaited: str = "processes") -> Iterator[None]:
    """Put the words by which programs recognize Horovod's errors before the text of an error of a job.

    `awaited`: the processes that Horovod's error names when the job did not start in time.
    """
    try:
        yield
    except TimeoutError as error:
        if error.operation == "start":
            error.args = (f"Timed out waiting for {awaited} to start: {error}",)
        raise
    except WorkerError as error:
        if error.rank >= 0:
            error.args = (
                f"Horovod detected that one or more processes exited with non-zero status: {error}",
            )
        raise


def _call(fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    return fn(*args, **kwargs)
