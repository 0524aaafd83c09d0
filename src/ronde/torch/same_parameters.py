"""Checks once that the optimizers of all ranks have the same parameters, before gradients are reduced."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ronde.engine import objects
from ronde.engine.operations import allgather
from ronde.engine.process import global_process_set
from ronde.engine.process_sets import ProcessSet
from ronde.errors import MismatchError

__all__ = ["difference", "require_same_parameters"]

_NAME = "DistributedOptimizer.parameters"
_DIGEST_BYTES = 16
_REMEDY = (
    "All ranks must give DistributedOptimizer the same parameters: build the same model everywhere, and freeze "
    "(requires_grad) the same parts of it"
)


def require_same_parameters(
    parameters: Sequence[Any], names: Mapping[int, str], process_set: ProcessSet | None
) -> bool:
    """Return whether all ranks have these parameters in the same order.

    All ranks of the set call it. Raises MismatchError on all of them if a name, a shape or a dtype differs. `names`: by
    the identity of each parameter.
    """
    mine = {
        names[id(parameter)]: f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        for parameter in parameters
    }
    digests = [_digest(list(mine.items())), _digest(sorted(mine.items()))]
    row = np.frombuffer(b"".join(digests), np.uint8).reshape(1, 2, _DIGEST_BYTES)
    rows = allgather(row, name=f"{_NAME}.digest", process_set=process_set)
    if (rows[:, 1] == rows[0, 1]).all():
        return bool((rows == rows[0]).all())
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
