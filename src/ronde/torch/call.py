"""An operation without its tensors: a public function builds one `Call`, and all below it take that as a whole.

A parameter that operations gain is a field here, and an argument where `Call` speaks to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ronde.engine import Handle
from ronde.engine.process import engine, place_of_root
from ronde.engine.process_sets import ProcessSet
from ronde.types import Kind, ReduceOp, Sum

__all__ = ["Call"]


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
    splits: Any = None  # the number of rows for each rank, as integers or a tensor

    def gradient(self, kind: Kind, op: ReduceOp = Sum, prescale: float = 1.0, postscale: float = 1.0) -> Call:
        """Return that of the gradient, which goes by a name derived from this one."""
        name = None if self.name is None else f"{self.name}.gradient"
        process_set, is_group = self.process_set, self.is_group
        return Call(kind, name, process_set, op, prescale, postscale, waits=True, is_group=is_group)

    def submit(self, tensor: Any, out: Any = None, device: str = "cpu") -> Handle:
        """Submit a tensor to the engine; see `Engine.submit`."""
        kind, name, process_set, op, prescale, postscale, _, waits, _, root, splits = self
        if root >= 0:
            root = place_of_root(root, process_set)
        members = engine(process_set)
        return members.submit(kind, tensor, name, op, root, prescale, postscale, splits, out, waits, device)

    def submit_group(self, tensors: Sequence[Any], outs: Sequence[Any] | None, device: str) -> Handle:
        """Submit tensors to the engine as a group; see `Engine.submit_group`."""
        kind, name, process_set, op, prescale, postscale, _, waits, *_ = self
        members = engine(process_set)
        return members.submit_group(kind, tensors, name, op, prescale, postscale, outs, waits, device)
