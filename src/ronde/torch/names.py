"""The names of an optimizer's parameters, by which ranks match their gradients.

Each optimizer has a number. Those that give one name to different parameters have different numbers, so that a backward
pass through two models submits no tensor twice.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

__all__ = ["free_number", "named_by_parameter", "names_of", "note_number", "parameters_of", "tensor_name"]

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


def named_by_parameter(parameters: dict[str, Any], names: dict[int, str]) -> dict[Any, str]:
    """Return the names by the parameters themselves."""
    return {parameter: names[id(parameter)] for parameter in parameters.values()}


def free_number(names: dict[int, str]) -> int:
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


def note_number(optimizer: Any, number: int) -> None:
    """Give the optimizer the number on which the ranks have agreed, for as long as it lives."""
    optimizer._number = number
    _numbered.add(optimizer)


def tensor_name(optimizer: Any, parameter: Any) -> str:
    """Return the name of the parameter's gradient in the engine."""
    name: str = optimizer._names[id(parameter)]
    number = optimizer._number
    return f"{name} of optimizer {number + 1}" if number else name
