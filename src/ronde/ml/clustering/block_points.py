"""The points and weights of a row block.

float32 has no digits left for rows that lie far from the origin, and close together: centers then end elsewhere than
those of the same rows in float64. So a fit subtracts an offset from the columns of such rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.clustering.geometry import GEOMETRIES
from ronde.ml.clustering.points import Points, make_csr
from ronde.ml.sparse_rows import is_sparse

__all__ = ["PointReader", "offset_of"]

Array = NDArray[Any]

FAR = 8  # times the spread of a column


@dataclass(frozen=True)
class PointReader:
    """Makes points of rows by a metric, in a dtype. `offset`: is subtracted from each row, an array; None: nothing."""

    metric: str
    dtype: np.dtype[Any]
    offset: Array | None = None

    def points(self, rows: Any) -> Points:
        """Return the points of rows: a C-contiguous array, or a CSR array of those of a sparse matrix.

        Raises ValueError for rows that the metric does not take.
        """
        if is_sparse(rows):
            return GEOMETRIES[self.metric].points(make_csr(rows, dtype=self.dtype))
        points = GEOMETRIES[self.metric].points(np.asarray(rows, self.dtype))
        if self.offset is not None:
            points = points - self.offset
        return np.ascontiguousarray(points, self.dtype)

    def rows(self, points: Array) -> Array:
        """Return rows of points: centers as the user sees them."""
        rows = GEOMETRIES[self.metric].rows(points)
        return rows if self.offset is None else rows + self.offset

    def without_offset(self) -> PointReader:
        """Return what makes points of rows as they are."""
        return replace(self, offset=None)

    def of_block(self, block: Any) -> tuple[Points, Array | None]:
        """Return the points and weights of a block; None: its rows have no weights."""
        weights = getattr(block, "sample_weight", None)
        return self.points(block.X), None if weights is None else np.asarray(weights, np.float64)


def offset_of(sample: Array) -> Array | None:
    """Return the offset for float32 rows of which these are some; None if no column lies far from 0."""
    middle = np.median(sample, axis=0)
    is_far = np.abs(middle) > FAR * np.median(np.abs(sample - middle), axis=0)
    return np.where(is_far, middle, 0).astype(np.float32) if is_far.any() else None
