"""The forms in which the methods of a process group can be called.

torch.distributed's functions pass lists of tensors and an options object. `ProcessGroup` also has forms for people: one
tensor in the place of a list, and values in the place of the options, such as `group.reduce(tensor, 0, ReduceOp.MAX)`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from ronde.errors import UsageError

__all__ = ["listed", "with_values"]


def listed(*arguments: Any) -> Any:
    """Return what PyTorch passes for these arguments: each in a list, if one of them is a tensor.

    >>> listed([1, 2], torch.tensor(3))
    ([[1, 2]], [tensor(3)])
    """
    if any(isinstance(each, torch.Tensor) for each in arguments):
        return tuple([each] for each in arguments)
    return arguments


def with_values(options: Any, *values: object, **named: object) -> Any:
    """Return the options after setting what the values are, by their types: a reduction, a root, a time limit.

    Raises UsageError for another type.
    """
    for value in (*values, *named.values()):
        if isinstance(value, ReduceOp):
            options.reduceOp = value
        elif isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            raise UsageError(
                f"{value!r} is not an argument of this operation: pass {type(options).__name__}, a reduction, the rank "
                f"of the root or a timeout"
            )
    return options
