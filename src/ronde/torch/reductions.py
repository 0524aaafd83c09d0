"""Reductions of tensors of all ranks: dense or sparse, on any device, alone or in a group.

Sparse tensors of a group are gathered, each under a separate name, while the dense ones travel together. The group's
own name reveals whether the ranks' groups differ, so waiting begins with it: the rest may then never complete. (If a
tensor is sparse on some ranks only, it stays in flight there, under the name of the group, a dot and its position, and
these ranks cannot use that name again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ronde.engine.process_sets import ProcessSet
from ronde.torch.groups import places_of, start_group
from ronde.torch.handles import Handle, start
from ronde.torch.sparse import start_sparse
from ronde.types import Kind, ReduceOp

__all__ = ["Reduction", "start_grouped_reductions", "start_reduction"]


class Reduction(NamedTuple):
    """The operation and factors of a reduction."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


def start_reduction(
    kind: Kind,
    tensor: Any,
    name: str | None,
    reduction: Reduction,
    *,
    in_place: bool = False,
    waits: bool = False,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Submit a tensor for an all-reduce or a reduce-scatter."""
    op, prescale, postscale = reduction
    how: dict[str, Any] = dict(
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        in_place=in_place,
        waits=waits,
        process_set=process_set,
    )
    if kind is Kind.allreduce and tensor.is_sparse:
        return start_sparse(tensor, **how)
    return start(kind, tensor, **how)


def start_grouped_reductions(
    kind: Kind,
    tensors: Sequence[Any],
    name: str | None,
    reduction: Reduction,
    *,
    in_place: bool = False,
    waits: bool = False,
    process_set: ProcessSet | None = None,
) -> Handle:
    """Submit tensors as a group for an all-reduce or a reduce-scatter; waiting returns the list of results."""
    op, prescale, postscale = reduction
    how: dict[str, Any] = dict(
        op=op, prescale=prescale, postscale=postscale, in_place=in_place, process_set=process_set
    )
    tensors = list(tensors)
    sparse = [index for index, tensor in enumerate(tensors) if tensor.is_sparse]
    if not sparse or kind is not Kind.allreduce:
        return start_group(kind, tensors, name=name, waits=waits, **how)
    dense = [index for index, tensor in enumerate(tensors) if not tensor.is_sparse]
    group = None
    if dense:
        places = places_of(tensors)
        group = start_group(kind, [tensors[index] for index in dense], name=name, places=places, **how)
    others: dict[int, Handle] = {}
    for index in sparse:
        # If all are sparse, the first takes the group's name, so that a rank with dense tensors gets a mismatch.
        is_named = name is None or (not dense and index == sparse[0])
        others[index] = start_sparse(tensors[index], name=name if is_named else f"{name}.{index}", **how)
    return _Mixed(group, dense, others)


class _Mixed:
    """A group in which some tensors are sparse."""

    def __init__(self, group: Handle | None, dense: Sequence[int], others: dict[int, Handle]) -> None:
        self._group, self._dense, self._others = group, dense, others

    def wait(self) -> list[Any]:
        results = {} if self._group is None else dict(zip(self._dense, self._group.wait(), strict=True))
        results |= {index: handle.wait() for index, handle in self._others.items()}
        return [results[index] for index in range(len(results))]

    def done(self) -> bool:
        handles = [*self._others.values(), *([] if self._group is None else [self._group])]
        return all(handle.done() for handle in handles)
