"""The names of an optimizer's parameters, by which ranks match their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

__all__ = ["named_by_parameter", "names_of", "parameters_of"]


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
