"""Errors that are raised again: copies, because a raised error holds the frames of its caller."""

from __future__ import annotations

import copy

__all__ = ["fresh"]


def fresh(error: BaseException) -> BaseException:
    """Return a copy of the error without a traceback, to be raised.

    A handle or an engine keeps the error it has failed with, and raises it in every later call. The error itself would
    keep the frames of all its callers alive, with their local variables.
    """
    try:
        return copy.copy(error)
    except Exception:  # of another library, whose constructor wants other arguments than `args`
        return error.with_traceback(None)
