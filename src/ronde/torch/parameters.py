"""An optimizer's parameters: their names, by which ranks match gradients, and the check that all ranks have the same.

Each optimizer has a number, on which the ranks agree in the check. Optimizers of one process may give one name to
different parameters, for example without `named_parameters`. Then their numbers differ, and so do the names of their
tensors, so that a backward pass through two models submits no tensor twice.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.comm.world import size
from ronde.engine import objects
from ronde.engine.operations import allgather
from ronde.engine.process import ProcessSet, global_process_set
from ronde.errors import MismatchError

__all__ = [
    "agree_on_parameters",
    "names_of",
    "number_alone",
    "parameters_of",
    "tensor_name",
]

_numbered: weakref.WeakSet[Any] = weakref.WeakSet()  # the distributed optimizers that live


def parameters_of(optimizer: Any) -> dict[str, Any]:
    """Return all parameters of an optimizer by default names."""
    return {
        f"gradient.{i}.{j}": parameter
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }


def names_of(parameters: dict[str, Any], named: Iterable[tuple[str, Any]] | None) -> dict[int, str]:
    """Return the parameters' names by their identity. Raises ValueError unless each has a unique name."""
    if named is None:
        return {id(parameter): name for name, parameter in parameters.items()}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() gives them"
        )
    counts = Counter(name for name, _ in pairs)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(f"names in named_parameters must be unique; these are not: {', '.join(repeated)}")
    names = {id(parameter): name for name, parameter in sorted(pairs, key=lambda pair: pair[0])}
    unnamed = [
        f"{tuple(parameter.shape)} ({name})"
        for name, parameter in parameters.items()
        if id(parameter) not in names
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks parameters of the optimizer with the shapes {', '.join(unnamed)}"
        )
    return names


def _free_number(names: dict[int, str]) -> int:
    """Return a number above those of all optimizers that give one of these names to another parameter; 0 if none does.

    `names`: by the identity of each parameter. Ranks may drop optimizers at different times, so each asks for itself
    and all use the largest answer.
    """
    parameter_of = {name: parameter for parameter, name in names.items()}
    taken = [
        optimizer._number
        for optimizer in _numbered
        if any(parameter_of.get(name, parameter) != parameter for parameter, name in optimizer._names.items())
    ]
    return max(taken, default=-1) + 1


def tensor_name(optimizer: Any, parameter: Any) -> str:
    """Return the name of the parameter's gradient in the engine."""
    name: str = optimizer._names[id(parameter)]
    number = optimizer._number
    return f"{name} of optimizer {number + 1}" if number else name


def number_alone(optimizer: Any) -> None:
    """Number the optimizer, without the other ranks, which number theirs alike if they have the same optimizers."""
    optimizer._number = _free_number(optimizer._names)
    _numbered.add(optimizer)


# The check

_NAME = "DistributedOptimizer.parameters"
_DIGEST_BYTES = 16
_REMEDY = (
    "All ranks must give DistributedOptimizer the same parameters: build the same model everywhere, and freeze "
    "(requires_grad) the same parts of it"
)


def agree_on_parameters(
    optimizer: Any, parameters: Sequence[Any], process_set: ProcessSet | None
) -> bool | None:
    """Number the optimizer; return whether its trained parameters have the same order on all ranks.

    All ranks of the set call it. If some have joined instead, the others get None. Raises MismatchError on all ranks if
    a name, shape or dtype differs. The number is the largest that a rank proposes.
    """
    names = optimizer._names
    number = _free_number(names)
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
    if len(rows) < _members_of(process_set):
        return None
    if (rows[:, 1] == rows[0, 1]).all():
        optimizer._number = max(int.from_bytes(each.tobytes(), "little") for each in rows[:, 2])
        _numbered.add(optimizer)
        return bool((rows[:, :2] == rows[0, :2]).all())
    of_all = objects.allgather_object(mine, _NAME, process_set)
    numbers: Sequence[int] = range(len(of_all))
    if process_set is not None and process_set is not global_process_set and process_set.ranks:
        numbers = process_set.ranks
    raise MismatchError(_difference(dict(zip(numbers, of_all))))


def _members_of(process_set: ProcessSet | None) -> int:
    return size() if process_set is None or process_set is global_process_set else process_set.size()


def _digest(described: Sequence[tuple[str, str]]) -> bytes:
    return hashlib.blake2b(repr(described).encode(), digest_size=_DIGEST_BYTES).digest()


def _difference(of_ranks: Mapping[int, Mapping[str, str]]) -> str:
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
