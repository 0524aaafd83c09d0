"""An operation without its tensors, and the ranks that take part in it.

Each public function makes one `Call`, and everything below takes the whole `Call`. A new parameter of operations is a
field here, and an argument in `Call.submit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ronde.comm.world import rank, size
from ronde.engine import Handle
from ronde.engine.process import ProcessSet, engine, global_process_set, place_of_root
from ronde.errors import UsageError
from ronde.types import Kind, ReduceOp, Sum

__all__ = [
    "Call",
    "is_member",
    "place_in",
    "size_of",
]


class Call(NamedTuple):
    """What an operation does, under which name, and among which ranks."""

    kind: Kind
    name: str | None
    process_set: ProcessSet | None
    op: ReduceOp = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    in_place: bool = False  # results go into the tensors
    waits: bool = False  # the caller calls `wait()` at once
    is_group: bool = False  # of several tensors, with a list of results
    root: int = -1  # a rank of the world
    splits: torch.Tensor | Sequence[int] | None = None  # the number of rows for each rank

    def gradient(self, kind: Kind, op: ReduceOp = Sum, prescale: float = 1.0, postscale: float = 1.0) -> Call:
        """Return the call of the gradient, under the name of this one plus ".gradient"."""
        name = None if self.name is None else f"{self.name}.gradient"
        process_set, is_group = self.process_set, self.is_group
        return Call(kind, name, process_set, op, prescale, postscale, waits=True, is_group=is_group)

    def submit(self, tensor: torch.Tensor, out: torch.Tensor | None = None, device: str = "cpu") -> Handle:
        """Submit a tensor to the engine; see `Engine.submit`."""
        kind, name, process_set, op, prescale, postscale, _, waits, _, root, splits = self
        if root >= 0:
            root = place_of_root(root, process_set)
        members = engine(process_set)
        return members.submit(kind, tensor, name, op, prescale, postscale, out, waits, root, splits, device)

    def submit_group(self, tensors: Sequence[Any], outs: Sequence[Any] | None, device: str) -> Handle:
        """Submit tensors to the engine as a group; see `Engine.submit_group`."""
        kind, name, process_set, op, prescale, postscale, _, waits, *_ = self
        members = engine(process_set)
        return members.submit_group(kind, tensors, name, op, prescale, postscale, outs, waits, device)


def size_of(process_set: ProcessSet | None) -> int:
    """Return the number of ranks that take part. Raises as `place_in`, but not on ranks outside the set."""
    return size() if _is_world(process_set) else _checked(process_set).size()


def place_in(process_set: ProcessSet | None) -> int:
    """Return this rank's place among those that take part.

    Raises NotInitializedError before `init`, UsageError if `process_set` is not a set, not added, or without this rank.
    """
    return rank() if _is_world(process_set) else _checked(process_set).rank()


def is_member(process_set: ProcessSet | None) -> bool:
    """Return whether this rank takes part. Raises as `size_of`."""
    return _is_world(process_set) or _checked(process_set).included()


def _is_world(process_set: ProcessSet | None) -> bool:
    return process_set is None or process_set is global_process_set


def _checked(process_set: object) -> ProcessSet:
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"process_set must be a ProcessSet, not {process_set!r}")
    return process_set
