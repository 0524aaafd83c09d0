"""Copies errors to raise them again, because a raised error holds the frames of its caller."""

from __future__ import annotations

import copy

__all__ = ["fresh"]


def fresh(error: BaseException) -> BaseException:
    """Return a copy of the error without a traceback.

    A handle or an engine keeps its error and raises it in every later call. The original would keep the frames of all
    its callers alive, with their local variables.
    """
    try:
        return copy.copy(error)
    except Exception:  # an error of a library whose constructor expects other arguments than `args`
        return error.with_traceback(None)
