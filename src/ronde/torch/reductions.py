"""Reductions of tensors of all ranks: dense or sparse, on any device, alone or in a group.

Sparse tensors of a group are gathered, each under a separate name, while the dense ones travel together. The group's
own name reveals whether the ranks' groups differ, so waiting begins with it: the rest may then never complete. (If a
tensor is sparse on some ranks only, it stays in flight there, under the name of the group, a dot and its position, and
these ranks cannot use that name again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde.torch.call import Call
from ronde.torch.groups import places_of, start_group
from ronde.torch.handles import Handle, check_tensors, start_dense
from ronde.torch.sparse import start_sparse
from ronde.types import Allreduce

__all__ = ["start_tensor", "start_tensors"]


def start_tensor(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a tensor for an all-reduce, or a dense tensor for any operation."""
    if call.kind is Allreduce and getattr(tensor, "is_sparse", False):
        return start_sparse(call, tensor)
    return start_dense(call, tensor)


def start_tensors(call: Call, tensors: Sequence[Any]) -> Handle[Any]:
    """Submit a group for an all-reduce, or of dense tensors for any operation; waiting returns the list of results."""
    tensors = list(tensors)
    check_tensors(tensors)
    sparse = [index for index, tensor in enumerate(tensors) if tensor.is_sparse]
    if not sparse or call.kind is not Allreduce:
        return start_group(call, tensors)
    dense = [index for index, tensor in enumerate(tensors) if not tensor.is_sparse]
    group = None
    if dense:
        later = call._replace(waits=False)  # the sparse ones are submitted before anything is waited for
        group = start_group(later, [tensors[index] for index in dense], places_of(tensors))
    others: dict[int, Handle[Any]] = {}
    for index in sparse:
        # Where nothing is dense, the first takes the group's name: so ranks of which one has dense ones hear of it.
        is_named = call.name is None or (not dense and index == sparse[0])
        each = call if is_named else call._replace(name=f"{call.name}.{index}")
        others[index] = start_sparse(each, tensors[index])
    return _Mixed(group, dense, others)


class _Mixed:
    """A group in which some tensors are sparse."""

    def __init__(
        self, group: Handle[Any] | None, dense: Sequence[int], others: dict[int, Handle[Any]]
    ) -> None:
        self._group, self._dense, self._others = group, dense, others

    def wait(self) -> list[Any]:
        results = {} if self._group is None else dict(zip(self._dense, self._group.wait(), strict=True))
        results |= {index: handle.wait() for index, handle in self._others.items()}
        return [results[index] for index in range(len(results))]

    def done(self) -> bool:
        handles = [*self._others.values(), *([] if self._group is None else [self._group])]
        return all(handle.done() for handle in handles)
