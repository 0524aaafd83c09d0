"""The metrics of k-means: how rows become points between which the Euclidean distance counts.

With `cosine` and `haversine` the points lie on the unit sphere. There the nearest center by the straight line is the
nearest by angle, too. A mean is projected back onto the sphere, which gives the point with the least sum of squared
distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.clustering.points import Points, make_csr, squared_lengths
from ronde.ml.sparse_rows import is_sparse

__all__ = ["GEOMETRIES", "Geometry"]

Array = NDArray[Any]

MOST_LATITUDE = np.pi / 2 + 1e-6  # radians; pi / 2 may be rounded up


@dataclass(frozen=True)
class Geometry:
    """A metric.

    Attributes:
        points: Makes points of rows, of the same kind: an array, or a CSR array.
        rows: Makes rows of points: centers as the user sees them.
        loss_scale: What a squared distance of points counts in the loss.
        is_spherical: Whether points lie on the unit sphere.
    """

    points: Callable[[Points], Points]
    rows: Callable[[Array], Array]
    loss_scale: float
    is_spherical: bool

    def means(self, sums: Array, weights: Array, otherwise: Array) -> Array:
        """Return the centers of clusters. `otherwise`: those of clusters without weight, or without a mean."""
        if self.is_spherical:
            weights = np.linalg.norm(sums, axis=1)
        has_mean = weights > 0
        if has_mean.all():
            return np.asarray(sums / weights[:, None], otherwise.dtype)
        means = np.array(otherwise)
        means[has_mean] = sums[has_mean] / weights[has_mean, None]
        return means


def _unchanged(rows: Points) -> Points:
    return rows


def _directions(rows: Points) -> Points:
    """Return rows divided by their lengths. Raises ValueError for a row of zeros."""
    lengths = np.sqrt(squared_lengths(rows)) if is_sparse(rows) else np.linalg.norm(rows, axis=1)
    if not lengths.all():
        raise ValueError(
            f"row {int(np.argmin(lengths))} of these {len(lengths)} consists of zeros, and the cosine metric needs a "
            "direction: leave such rows out"
        )
    if is_sparse(rows):
        numbers = rows.data / np.repeat(lengths, np.diff(rows.indptr))
        return make_csr((numbers.astype(rows.dtype), rows.indices, rows.indptr), rows.shape)
    return np.asarray(rows / lengths[:, None], rows.dtype)


def _on_the_globe(rows: Array) -> Array:
    """Return points on the unit sphere for latitudes and longitudes in radians. Raises ValueError for other rows."""
    if rows.shape[1] != 2:
        raise ValueError(
            f"rows have {rows.shape[1]} columns, and the haversine metric needs 2: latitude and longitude in radians"
        )
    latitude, longitude = rows.T
    wrong = np.flatnonzero(np.abs(latitude) > MOST_LATITUDE)
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of these {len(rows)} has the latitude {latitude[wrong[0]]:g}: expected radians from -pi/2 "
            "to pi/2 in the first column, so convert degrees by numpy.radians(), or exchange the columns"
        )
    points = [np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)]
    return np.stack(points, axis=1)


def _coordinates(points: Array) -> Array:
    x, y, z = points.T
    return np.stack([np.arctan2(z, np.hypot(x, y)), np.arctan2(y, x)], axis=1)


GEOMETRIES = {
    "euclidean": Geometry(_unchanged, _unchanged, 1.0, False),
    "cosine": Geometry(_directions, _unchanged, 0.5, True),
    "haversine": Geometry(_on_the_globe, _coordinates, 0.25, True),
}
