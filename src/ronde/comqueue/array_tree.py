"""Trees of arrays: an array, a number, None, or a dict, list, tuple or dataclass of trees.

Communicate functions work on the leaves, the arrays and numbers. Keys of dicts are taken in the order of their `repr`,
because tasks need not insert them in one order.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

__all__ = ["describe_tree", "leaves_of", "map_leaves"]

Leaf = NDArray[Any]


def leaves_of(tree: Any, name: str) -> list[Leaf]:
    """Return the leaves. Arrays are not copied; numbers become 0-d arrays.

    `name`: of the object, for the error. Raises UsageError for a leaf that is neither an array nor a number.
    """
    children = _children(tree)
    if children is None:
        return [_array(tree, name)]
    return [leaf for key, child in children for leaf in leaves_of(child, f"{name}{key}")]


def describe_tree(tree: Any) -> str:
    """Return structure, dtypes and shapes as a text, such as `float64 (3, 5)` or `dict(['n']: int64 ())`."""
    children = None if isinstance(tree, np.ndarray) else _children(tree)
    if children is None:
        array = _array(tree, "")
        return _describe_array(array.dtype, array.shape)
    inner = ", ".join(f"{key}: {describe_tree(child)}" for key, child in children)
    return f"{type(tree).__name__}({inner})" if tree is not None else "None"


@functools.lru_cache(maxsize=1000)  # NumPy takes several microseconds for the name of a dtype
def _describe_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}"


def map_leaves(tree: Any, change: Callable[[Leaf], Leaf]) -> Any:
    """Return a tree of the same structure with other leaves. `change` gets them in the order of `leaves_of`.

    In the place of a number, a 0-d array becomes a number.
    """
    children = _children(tree)
    if children is not None:
        return _rebuilt(tree, [map_leaves(child, change) for _, child in children])
    changed = change(_array(tree, ""))
    if isinstance(tree, np.ndarray) or changed.ndim:
        return changed
    return changed[()] if isinstance(tree, np.generic) else changed.item()


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a tree with their places in it, such as `['n']`; None for a leaf."""
    match tree:
        case None:
            return []
        case dict():
            return [(f"[{key!r}]", tree[key]) for key in sorted(tree, key=repr)]
        case list() | tuple():
            return [(f"[{number}]", child) for number, child in enumerate(tree)]
        case _ if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _rebuilt(tree: Any, children: Sequence[Any]) -> Any:
    """Return a tree like this one with other parts, in the order of `_children`."""
    match tree:
        case None:
            return None
        case dict():
            parts = dict(zip(sorted(tree, key=repr), children))
            return type(tree)((key, parts[key]) for key in tree)
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*children)
        case list() | tuple():
            return type(tree)(children)
    names = [field.name for field in dataclasses.fields(tree)]
    return dataclasses.replace(tree, **dict(zip(names, children)))


def _array(leaf: Any, name: str) -> Leaf:
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return leaf
    if isinstance(leaf, bool):
        return np.asarray(int(leaf))  # so that a sum counts
    if isinstance(leaf, (numbers.Number, np.generic)):
        return np.asarray(leaf)
    raise UsageError(
        f"{name} is of type {type(leaf).__qualname__}: expected an array, a number, or a dict, list, tuple or "
        "dataclass of these"
    )
