"""The outline of a nested value, such as a `state_dict`: the value with a slot in place of each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["TensorSlot", "fill", "outline_of"]


class TensorSlot(NamedTuple):
    """Stands for a tensor."""

    position: int
    shape: tuple[int, ...]
    dtype: Any


def outline_of(value: Any, tensors: list[Any]) -> Any:
    """Return nested lists and dicts with a slot for each tensor; append the tensors to the list."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            return TensorSlot(len(tensors) - 1, tuple(value.shape), value.dtype)
        case dict():
            return {key: outline_of(each, tensors) for key, each in value.items()}
        case list():
            return [outline_of(each, tensors) for each in value]
        case tuple() if type(value) is tuple:
            return tuple(outline_of(each, tensors) for each in value)
    return value


def fill(outline: Any, tensor_for: Callable[[TensorSlot], Any]) -> Any:
    """Return the outline with a tensor in each slot, in the order of `outline_of`."""
    match outline:
        case TensorSlot():
            return tensor_for(outline)
        case dict():
            return {key: fill(each, tensor_for) for key, each in outline.items()}
        case list():
            return [fill(each, tensor_for) for each in outline]
        case tuple() if type(outline) is tuple:
            return tuple(fill(each, tensor_for) for each in outline)
    return outline
