"""Completes the docstrings of operations, so that `help(f)` alone is enough.

Dozens of operations share their parameters and errors. A module describes these once, and `complete_help` appends to
each docstring the parts that it lacks:

1. A parameter without a description is a KeyError at import.
2. "Args:" or "Raises:" in the docstring of a function replace the shared ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["complete_help"]


def complete_help(
    functions: Iterable[Callable[..., Any]],
    parameters: Mapping[str, str],
    errors: Mapping[str, str],
    callers: str,
) -> None:
    """Append `callers`, "Args:" and "Raises:" to the docstrings of the functions.

    Args:
        functions: functions, or methods of a class, with a docstring (none under `python -OO`).
        parameters: a description of each parameter.
        errors: a cause for each error, by the name of its class.
        callers: which ranks must call the functions, and in which order; "" if the docstring has it.
    """
    for function in functions:
        if function.__doc__ is None:
            continue
        doc, indent = function.__doc__.rstrip(), "    " if "." not in function.__qualname__ else " " * 8
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        lines = [callers, ""] if callers else []
        described = (
            [(name, parameters[name]) for name in names if name != "self"] if "Args:" not in doc else []
        )
        if described:
            lines += ["Args:", *_wrapped(described), ""]
        if "Raises:" not in doc:
            lines += ["Raises:", *_wrapped(errors.items())]
        text = "\n".join(f"{indent}{line}".rstrip() for line in lines)
        function.__doc__ = f"{doc}\n\n{text}\n{indent}"


def _wrapped(described: Iterable[tuple[str, str]]) -> list[str]:
    return [
        line
        for name, description in described
        for line in textwrap.wrap(
            f"{name}: {description}", 104, initial_indent="    ", subsequent_indent="        "
        )
    ]
