"""The rows that estimators of k-means get, as data for `iterate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from sklearn.utils.validation import _check_sample_weight, check_array

from ronde.comqueue import LocatedRows, RowSource
from ronde.comqueue.row_blocks import MOST_ROWS
from ronde.data.rows import NamedArrays, is_dask_frame, is_flink_table
from ronde.ml.feature_names import check_features
from ronde.ml.row_arguments import as_rows, check_in_memory
from ronde.ml.source_data import SparseRows
from ronde.ml.sparse_rows import is_sparse
from ronde.ml.training_data import FLOATS, TrainingData, training_data

__all__ = [
    "MOST_LABELS",
    "accepted_formats",
    "is_here",
    "keeps_labels",
    "point_data",
    "rows_for_offset",
    "rows_in_pieces",
    "rows_per_block",
]

LEAST_SPARSE_ROWS = 256  # of a block: with fewer, calls of functions take more time
STORED_NUMBERS = 32  # of a sparse row: what the division into blocks supposes
SAMPLE = 1000  # rows that tell where the others lie
PIECE = 65536  # rows of a source that are in memory at once
MOST_LABELS = 10**8  # of rows that the tasks read: 400 MB


def point_data(estimator: Any, X: Any, sample_weight: Any = None, *, reset: bool = True) -> TrainingData:
    """Check X and sample_weight as `training_data` does, but leave the rows of a source of arrays to the tasks.

    Raises ValueError and TypeError.
    """
    if not reset and (hasattr(X, "mapInArrow") or is_dask_frame(X) or is_flink_table(X)):
        check_in_memory(X, f"a prediction of {type(estimator).__name__}", "")
    X, sample_weight = as_rows(X, sample_weight=sample_weight)
    first = X.load(0, 1) if isinstance(X, RowSource) else None
    if not reset and isinstance(X if first is None else first, LocatedRows | NamedArrays):
        raise ValueError(
            f"{X!r} has rows with several parts, or on a cluster: expected an array, or `read(path)`"
        )
    if first is None or isinstance(first, NamedArrays):
        return training_data(
            estimator,
            X,
            sample_weight=sample_weight,
            reset=reset,
            accept_sparse=accepted_formats(estimator.metric),
        )
    formats = accepted_formats(estimator.metric)
    first = check_array(first, accept_sparse=formats, dtype=FLOATS, estimator=estimator, input_name="X")
    check_features(estimator, X, first.shape[1], reset)
    if is_sparse(first):
        X = SparseRows(X, first.dtype)
    rows: dict[str, Any] = {"X": X}
    if sample_weight is not None:
        stand_in = np.broadcast_to(np.empty(1, first.dtype), (X.num_rows, first.shape[1]))
        rows["sample_weight"] = _check_sample_weight(sample_weight, stand_in, ensure_non_negative=True)
    return TrainingData(rows, X.num_rows, first.shape[1], first.dtype, float(X.num_rows))


def keeps_labels(data: TrainingData) -> bool:
    """Return whether the labels of a fit come back to this process, which may have room for no more than its own rows.

    Those of rows on a cluster do not: nothing tells which label belongs to which row.
    """
    if isinstance(data.rows, LocatedRows):
        return False
    return (isinstance(data.rows, dict) and is_here(data.rows["X"])) or data.num_rows <= MOST_LABELS


def rows_for_offset(data: TrainingData) -> Any | None:
    """Return the first rows in float64; None if the rows are sparse, or on a cluster."""
    X = data.rows["X"] if isinstance(data.rows, dict) else None
    if X is None or is_sparse(X) or isinstance(X, SparseRows):
        return None
    count = min(SAMPLE, data.num_rows)
    return np.asarray(X[:count] if is_here(X) else X.load(0, count), np.float64)


def rows_per_block(data: TrainingData) -> int:
    """Return how many rows a row block has at least, for `iterate`. It does not depend on the tasks.

    The sums of a block have a number for each cluster and column. So that they take no more time than the few stored
    numbers, a block of sparse rows has the more rows, the more columns there are. Rows of a source are divided alike.
    """
    X = data.rows["X"] if isinstance(data.rows, dict) else None
    if not is_sparse(X) and not isinstance(X, SparseRows):
        return 1
    return max(LEAST_SPARSE_ROWS, min(MOST_ROWS, data.num_features // STORED_NUMBERS))


def accepted_formats(metric: str) -> Literal["csr", False]:
    """Return the sparse format of rows that k-means takes with a metric; False: none."""
    return False if metric == "haversine" else "csr"


def is_here(X: Any) -> bool:
    """Return whether the checked rows are in the memory of this process."""
    return isinstance(X, np.ndarray) or is_sparse(X)


def rows_in_pieces(data: TrainingData) -> Iterator[Any]:
    """Yield the rows: an array or a sparse matrix as a whole, those of a source piece by piece.

    Raises ValueError for invalid ones.
    """
    X = data.rows["X"]
    if is_here(X):
        yield X
        return
    for begin in range(0, data.num_rows, PIECE):
        rows = X.load(begin, min(begin + PIECE, data.num_rows))
        if not is_sparse(rows):
            rows = np.asarray(rows, data.dtype)
        if not np.isfinite(rows.data if is_sparse(rows) else rows).all():
            raise ValueError(f"X contains NaN or infinity in the {rows.shape[0]} rows from row {begin} on")
        yield rows
