"""Gradients in symmetric memory, where all ranks of a host reduce them in place.

One buffer holds the gradients of all parameters, in the order in which backward passes compute them: the last
parameters first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ronde.comm.world import world

__all__ = ["GradientMemory", "symmetric_places"]

_ALIGNMENT_BYTES = 64  # a cache line: neighbours are reduced by different ranks


class GradientMemory(NamedTuple):
    """Memory for a gradient: `gradient` has the parameter's layout, `sent` is the same memory, contiguous.

    `memory` is the whole buffer as bytes, in which the gradient begins at `offset` and the next one at `end`.
    """

    gradient: Any
    sent: Any
    memory: Any
    offset: int
    end: int


def symmetric_places(parameters: Sequence[Any]) -> list[GradientMemory | None]:
    """Return memory for each parameter's gradient; None for those that are not real floats on the CPU.

    All ranks call it with parameters of the same shapes and dtypes; otherwise it raises MismatchError.
    """
    offsets, end = [], 0
    for parameter in reversed(parameters):
        offsets.append(end)
        if _is_placeable(parameter):
            end += _padded(parameter.nbytes)
    memory = torch.from_numpy(world().empty(end, np.uint8))
    return [
        _place(parameter, memory, offset) if _is_placeable(parameter) else None
        for parameter, offset in zip(parameters, reversed(offsets))
    ]


def _is_placeable(parameter: Any) -> bool:
    return bool(parameter.is_cpu and parameter.is_floating_point() and parameter.layout is torch.strided)


def _place(parameter: Any, memory: Any, offset: int) -> GradientMemory:
    flat = memory[offset : offset + parameter.nbytes].view(parameter.dtype)
    # The strides that autograd gives a gradient: the parameter's if it is dense, otherwise those of a contiguous
    # tensor.
    strides = torch.empty_like(parameter, device="meta").stride()
    gradient = flat.as_strided(parameter.shape, strides)
    sent = gradient if gradient.is_contiguous() else flat
    return GradientMemory(gradient, sent, memory, offset, offset + _padded(parameter.nbytes))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
