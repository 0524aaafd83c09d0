"""Packs the leaves of a tree into flat arrays, one for each dtype, in which tasks exchange them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "layout_of"]

Array = NDArray[Any]


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
