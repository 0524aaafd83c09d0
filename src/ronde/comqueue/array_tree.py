"""Trees of arrays: an array, a number, None, or a dict, list, tuple or dataclass of trees.

Communicate functions work on the leaves, the arrays and numbers. Keys of dicts are sorted by their `repr`, because
tasks may insert them in different orders. To exchange a tree, tasks pack its leaves into flat arrays, one for each
dtype: its `Layout` says where they lie.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError

__all__ = [
    "Layout",
    "Structure",
    "checksum_of",
    "describe_tree",
    "flatten",
    "layout_of",
    "leaf_array",
    "leaves_of",
    "map_leaves",
    "named_parts",
]


Array = NDArray[Any]
Leaf = Array
Structure = tuple[Hashable, ...]  # of a tree; equal for trees that differ in the values of their leaves only


def flatten(tree: Any, name: str) -> tuple[list[Leaf], Structure]:
    """Return the leaves and the structure, which contains their dtypes and shapes.

    Arrays are not copied; numbers become 0-d arrays. `name`: of the object, for the error. Raises UsageError for a leaf
    that is neither an array nor a number.
    """
    if type(tree) is np.ndarray and not tree.dtype.hasobject:
        return [tree], (tree.dtype, tree.shape)
    leaves: list[Leaf] = []
    structure: list[Hashable] = []
    try:
        _collect(tree, leaves, structure)
    except _NotALeaf:
        _raise_for_leaf(tree, name)
        raise
    return leaves, tuple(structure)


def leaves_of(tree: Any, name: str) -> list[Leaf]:
    """Return the leaves, as `flatten` does."""
    return flatten(tree, name)[0]


class _NotALeaf(Exception):
    """The text says what the object is instead."""


def _collect(tree: Any, leaves: list[Leaf], structure: list[Hashable]) -> None:
    parts = _parts(tree)
    if parts is None:
        array = _array(tree)
        leaves.append(array)
        structure += (array.dtype, array.shape)
        return
    structure.append((type(tree).__name__, _key_order(tuple(tree)) if isinstance(tree, dict) else len(parts)))
    for part in parts:
        _collect(part, leaves, structure)


@functools.lru_cache(maxsize=1000)
def checksum_of(structure: Structure) -> int:
    """Return a number that is the same in all processes for equal structures, and very likely differs for others."""
    return zlib.crc32(repr(structure).encode())


def describe_tree(tree: Any) -> str:
    """Return the structure as a text, such as `float64 (3, 5)` or `dict(['n']: int64 ())`. Takes any object."""
    if tree is None:
        return "None"
    if _parts(tree) is not None:
        inner = ", ".join(f"{place}: {describe_tree(part)}" for place, part in _places(tree))
        return f"{type(tree).__name__}({inner})"
    try:
        array = _array(tree)
    except _NotALeaf:
        return type(tree).__qualname__
    return f"{array.dtype} {array.shape}"


def map_leaves(tree: Any, change: Callable[[Leaf], Leaf]) -> Any:
    """Return a tree of the same structure with other leaves. `change` gets them in the order of `leaves_of`.

    In the place of a number, a 0-d array becomes a number.
    """
    parts = _parts(tree)
    if parts is not None:
        return _rebuilt(tree, [map_leaves(part, change) for part in parts])
    changed = change(_array(tree))
    if isinstance(tree, np.ndarray) or changed.ndim:
        return changed
    return changed[()] if isinstance(tree, np.generic) else changed.item()


def named_parts(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a tree with their places in it, such as `['n']`; None for a leaf. Takes any object."""
    return None if _parts(tree) is None else list(_places(tree))


def leaf_array(leaf: Any) -> Leaf | None:
    """Return a leaf as an array; None if it is neither an array nor a number."""
    try:
        return _array(leaf)
    except _NotALeaf:
        return None


def _parts(tree: Any) -> list[Any] | None:
    """Return the parts of a tree; None for a leaf."""
    match tree:
        case np.ndarray() | float():  # leaves, most often
            return None
        case None:
            return []
        case dict():
            return [tree[key] for key in _key_order(tuple(tree))]
        case list() | tuple():
            return list(tree)
        case _ if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


@functools.lru_cache(maxsize=1000)
def _key_order(keys: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    return tuple(sorted(keys, key=repr))


def _places(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a tree with their places in it, such as `['n']`."""
    match tree:
        case dict():
            names = [f"[{key!r}]" for key in _key_order(tuple(tree))]
        case list() | tuple():
            names = [f"[{number}]" for number in range(len(tree))]
        case _ if dataclasses.is_dataclass(tree):
            names = [f".{field.name}" for field in dataclasses.fields(tree)]
        case _:
            names = []
    return zip(names, _parts(tree) or ())


def _rebuilt(tree: Any, parts: Sequence[Any]) -> Any:
    """Return a tree like this one with other parts, in the order of `_parts`."""
    match tree:
        case None:
            return None
        case dict():
            by_key = dict(zip(_key_order(tuple(tree)), parts))
            return type(tree)((key, by_key[key]) for key in tree)
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        case list() | tuple():
            return type(tree)(parts)
    names = [field.name for field in dataclasses.fields(tree)]
    return dataclasses.replace(tree, **dict(zip(names, parts)))


def _array(leaf: Any) -> Leaf:
    if isinstance(leaf, (bool, np.bool_)):
        return np.asarray(int(leaf))  # so that a sum counts
    if type(leaf) is int and not -(1 << 63) <= leaf < 1 << 63:
        raise _NotALeaf("an int of more than 64 bits")
    if isinstance(leaf, np.ma.MaskedArray):
        raise _NotALeaf("a masked array, whose mask would be lost")
    if isinstance(leaf, (np.ndarray, numbers.Number, np.generic)):
        array = np.asarray(leaf)
        if not array.dtype.hasobject:
            return array
    raise _NotALeaf(f"of type {type(leaf).__qualname__}")


def _raise_for_leaf(tree: Any, name: str) -> None:
    """Raise UsageError for the first leaf that is neither an array nor a number."""
    if _parts(tree) is not None:
        for place, part in _places(tree):
            _raise_for_leaf(part, f"{name}{place}")
        return
    try:
        _array(tree)
    except _NotALeaf as reason:
        raise UsageError(
            f"{name} is {reason}: expected an array, a number, or a dict, list, tuple or dataclass of these"
        ) from None


@dataclass(frozen=True)
class _Place:
    """Where a leaf lies: in which flat array, from where to where, in elements."""

    flat: int
    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The flat arrays of trees of one structure. `dtypes`, `sizes`: of each; `places`: of the leaves."""

    dtypes: Sequence[np.dtype[Any]]
    sizes: Sequence[int]
    places: Sequence[_Place]

    def pack(self, leaves: Sequence[Array], flats: Sequence[Array]) -> None:
        """Copy leaves into flat arrays."""
        for leaf, part in zip(leaves, self.parts(flats)):
            part[...] = leaf

    def parts(self, flats: Sequence[Array]) -> Iterator[Array]:
        """Yield the leaves as views of flat arrays; of arrays with more axes, they lie along the last one."""
        for place in self.places:
            flat = flats[place.flat]
            yield flat[..., place.begin : place.end].reshape((*flat.shape[:-1], *place.shape))


def layout_of(leaves: Sequence[Array]) -> Layout:
    """Return the layout of the leaves of a tree."""
    return _layout_of(tuple((leaf.dtype, leaf.shape) for leaf in leaves))


@functools.lru_cache(maxsize=1000)
def _layout_of(kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> Layout:
    dtypes = list(dict.fromkeys(dtype for dtype, _ in kinds))
    sizes = [0] * len(dtypes)
    places = []
    for dtype, shape in kinds:
        flat = dtypes.index(dtype)
        begin = sizes[flat]
        sizes[flat] += math.prod(shape)
        places.append(_Place(flat, begin, sizes[flat], shape))
    return Layout(dtypes, sizes, places)
