"""The points and weights of a row block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.light_dataclasses import dataclass
from ronde.ml.clustering.geometry import GEOMETRIES
from ronde.ml.clustering.points import Points, make_csr
from ronde.ml.sparse_rows import is_sparse

__all__ = ["PointReader"]

Array = NDArray[Any]


@dataclass(frozen=True)
class PointReader:
    """Makes points of rows by a metric, in a dtype."""

    metric: str
    dtype: np.dtype[Any]

    def points(self, rows: Any) -> Points:
        """Return the points of rows: a C-contiguous array, or a CSR array of those of a sparse matrix.

        Raises ValueError for rows that the metric does not take.
        """
        if is_sparse(rows):
            return GEOMETRIES[self.metric].points(make_csr(rows, dtype=self.dtype))
        points = GEOMETRIES[self.metric].points(np.asarray(rows, self.dtype))
        return np.ascontiguousarray(points, self.dtype)

    def of_block(self, block: Any) -> tuple[Points, Array | None]:
        """Return the points and weights of a block; None: its rows have no weights."""
        weights = getattr(block, "sample_weight", None)
        return self.points(block.X), None if weights is None else np.asarray(weights, np.float64)
