"""Functions for Horovod that a cluster's workers call: unpickling one imports `ronde.compat` there first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

__all__ = ["with_horovod"]

R = TypeVar("R")


def with_horovod(fn: Callable[..., R]) -> Callable[..., R]:
    """Return a function like `fn` for which, where it is unpickled, Ronde answers for Horovod."""
    return partial(_call, fn)


def _call(fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    return fn(*args, **kwargs)
