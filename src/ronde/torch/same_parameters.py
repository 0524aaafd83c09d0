"""Checks once that the optimizers of all ranks have the same parameters, before gradients are reduced.

The ranks agree on the optimizer's number by the way. Optimizers of one process may give the same name to different
parameters, for example without `named_parameters`; then their numbers differ, and so do the names of their tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde.engine import objects
from ronde.engine.operations import allgather
from ronde.engine.process import ProcessSet, global_process_set
from ronde.errors import MismatchError

__all__ = ["Agreement", "difference", "require_same_parameters"]

_NAME = "DistributedOptimizer.parameters"
_DIGEST_BYTES = 16
_REMEDY = (
    "All ranks must give DistributedOptimizer the same parameters: build the same model everywhere, and freeze "
    "(requires_grad) the same parts of it"
)


class Agreement(NamedTuple):
    """`is_ordered`: the parameters have the same order on all ranks. `number`: the largest one that a rank proposed."""

    is_ordered: bool
    number: int


def require_same_parameters(
    parameters: Sequence[Any], names: Mapping[int, str], process_set: ProcessSet | None, number: int = 0
) -> Agreement:
    """Return what the ranks agree on, if all have these parameters.

    All ranks of the set call it. Raises MismatchError on all of them if a name, a shape or a dtype differs. `names`: by
    the identity of each parameter. `number`: the smallest number that this rank has free for the optimizer.
    """
    mine = {
        names[id(parameter)]: f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        for parameter in parameters
    }
    parts = [
        _digest(list(mine.items())),
        _digest(sorted(mine.items())),
        number.to_bytes(_DIGEST_BYTES, "little"),
    ]
    row = np.frombuffer(b"".join(parts), np.uint8).reshape(1, 3, _DIGEST_BYTES)
    rows = np.asarray(allgather(row, name=f"{_NAME}.digest", process_set=process_set))
    if (rows[:, 1] == rows[0, 1]).all():
        is_ordered = bool((rows[:, :2] == rows[0, :2]).all())
        return Agreement(is_ordered, max(int.from_bytes(each.tobytes(), "little") for each in rows[:, 2]))
    of_all = objects.allgather_object(mine, _NAME, process_set)
    numbers: Sequence[int] = range(len(of_all))
    if process_set is not None and process_set is not global_process_set and process_set.ranks:
        numbers = process_set.ranks
    raise MismatchError(difference(dict(zip(numbers, of_all))))


def _digest(described: Sequence[tuple[str, str]]) -> bytes:
    return hashlib.blake2b(repr(described).encode(), digest_size=_DIGEST_BYTES).digest()


def difference(of_ranks: Mapping[int, Mapping[str, str]]) -> str:
    """Return the difference between the first rank and the first rank with other parameters."""
    first, *others = of_ranks
    other = next(rank for rank in others if of_ranks[rank] != of_ranks[first])
    one, another = of_ranks[first], of_ranks[other]
    differing = [name for name in {**one, **another} if one.get(name) != another.get(name)]
    name = differing[0]
    if name in one and name in another:
        what = f"parameter '{name}' is {one[name]} on rank {first}, but {another[name]} on rank {other}"
    else:
        has, lacks = (first, other) if name in one else (other, first)
        shape = of_ranks[has][name]
        what = f"rank {has} trains parameter '{name}' {shape}, which rank {lacks} does not have, or does not train"
    more = f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
    return f"{what}{more}. {_REMEDY}"
