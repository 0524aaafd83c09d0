"""The arguments of `fit` as data for `iterate`, checked as scikit-learn's estimators check them.

Some name rows elsewhere: a path, a data frame or a table on a cluster, a column. `as_rows` makes sources of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from ronde.comm.arrays import check_not_masked
from ronde.comqueue import LocatedRows, RowSource, read
from ronde.comqueue.partitions import is_located
from ronde.data.needs import need
from ronde.data.rows import is_dask_frame, is_flink_table, is_source
from ronde.ml.source_data import (
    ClassWeights,
    HeldRows,
    checked_parts,
    is_sparse,
    mapped_rows,
    survey,
    weights_by_class,
    without_duplicates,
)

__all__ = [
    "FLOATS",
    "TrainingData",
    "as_rows",
    "check_features",
    "check_in_memory",
    "is_cluster_frame",
    "least_rows_of_block",
    "training_data",
]

FLOATS = (np.float64, np.float32)
NO_TARGET = object()
NUMBERS_OF_BLOCK = 1 << 17  # of X: for fewer, the calls of functions would take longer than their work
MOST_LEAST_ROWS = 4096  # a block of more rows need not have as many numbers
Parts = dict[str, Any]


@dataclass(frozen=True)
class TrainingData:
    """Rows for `iterate`.

    Attributes:
        rows: `data` of `iterate`: a dict, or a source whose rows are read by the tasks. In both cases `c.data` and the
            blocks have the attributes `X`, and `y` and `sample_weight` if they were given. X is a C-contiguous array or
            a CSR matrix without duplicates, float64 or float32.
        num_rows: How many rows there are.
        num_features: How many columns X has.
        dtype: The dtype of X.
        total_weight: The sum of the rows' weights.
        class_weights: The classes in y, sorted, and the sum of the weights of each; None unless y consists of classes.
    """

    rows: Any
    num_rows: int
    num_features: int
    dtype: np.dtype[Any]
    total_weight: float
    class_weights: ClassWeights | None = None

    @property
    def size(self) -> int:
        """How many numbers a step reads, for `place_of`."""
        if isinstance(self.rows, Mapping) and is_sparse(self.rows["X"]):
            return int(self.rows["X"].nnz)
        return self.num_rows * self.num_features

    @property
    def work(self) -> int:
        """What a step of a linear model does, for `place_of`: less with each number than one of k-means."""
        return self.size // 4

    @property
    def rows_per_block(self) -> int:
        """How many rows a row block has at least, for `iterate`. It does not depend on the tasks."""
        return least_rows_of_block(self.num_rows, self.size)

    def rows_at(self, place: Any) -> Any:
        """Return `data` of `iterate` for tasks at a place. Threads of this process share the rows."""
        is_shared = isinstance(self.rows, Mapping) and isinstance(place, str) and place.startswith("threads")
        return HeldRows(self.rows) if is_shared else self.rows

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a row of y: () for one number, also of a source."""
        return tuple(self.rows["y"].shape[1:]) if isinstance(self.rows, Mapping) else ()

    @property
    def for_callbacks(self) -> dict[str, Any]:
        """X, y and metadata as the callbacks of scikit-learn get them; none of a source."""
        if not isinstance(self.rows, Mapping):
            return {}
        weights = self.rows.get("sample_weight")
        metadata = None if weights is None else {"sample_weight": weights}
        return {"X": self.rows["X"], "y": self.rows.get("y"), "metadata": metadata}

    def require_weight(self) -> None:
        """Raise ValueError if no row has a weight."""
        if not self.total_weight > 0:
            raise ValueError(f"the weights of all rows add up to {self.total_weight}: expected a sum above 0")

    def mapped(self, function: Callable[[Parts], Parts]) -> TrainingData:
        """Return the data with other parts. `function`: gets and returns parts of some rows; it travels to tasks."""
        if isinstance(self.rows, Mapping):
            return replace(self, rows=function(dict(self.rows)))
        return replace(self, rows=mapped_rows(self.rows, function))


def least_rows_of_block(num_rows: int, size: int) -> int:
    """Return how many rows a row block has at least. `size`: how many numbers a step reads."""
    return max(1, min(MOST_LEAST_ROWS, NUMBERS_OF_BLOCK * num_rows // max(1, size)))


def training_data(
    estimator: Any,
    X: Any,
    y: Any = NO_TARGET,
    sample_weight: Any = None,
    *,
    qid: Any = None,
    reset: bool = True,
    are_classes: bool = False,
    **options: Any,
) -> TrainingData:
    """Check X, y and sample_weight, and set `n_features_in_` and `feature_names_in_` of the estimator.

    `X`: may be a source, whose rows have y and weights, too, or what `as_rows` turns into one; `y`: `NO_TARGET` if the
    estimator has none.
    `qid`: of a ranking, the query of each row; its runs of equal ones become numbers from 0, or the name of a column.
    `reset`: False for a later `partial_fit`. `are_classes`: whether y consists of classes. `options`: of scikit-learn's
    `validate_data`, for example `accept_sparse="csr"`.

    Raises ValueError and TypeError, with scikit-learn's messages.
    """
    has_target = y is not NO_TARGET
    named = {} if qid is None else {"qid": qid}
    X, given, sample_weight, *queries = as_rows(
        X, y=y if has_target else None, sample_weight=sample_weight, **named
    )
    if is_source(X) or is_located(X):
        others = (given, sample_weight, *queries)
        return _data_of_source(estimator, X, has_target, are_classes, reset, others, options)
    options = {"dtype": FLOATS, "order": "C", **options}
    if has_target:
        rows = dict(zip(("X", "y"), validate_data(estimator, X, given, reset=reset, **options)))
    else:
        rows = {"X": validate_data(estimator, X, reset=reset, **options)}
    if is_sparse(rows["X"]):
        rows["X"] = without_duplicates(rows["X"])
    X = rows["X"]
    if queries:
        rows["qid"] = _numbers_of_runs(queries[0], X)
    total_weight, class_weights = float(X.shape[0]), None
    if sample_weight is not None:
        weights = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
        rows["sample_weight"], total_weight = weights, float(weights.sum(dtype=np.float64))
    if are_classes:
        check_classification_targets(rows["y"])
        class_weights = weights_by_class(rows)
    return TrainingData(rows, X.shape[0], X.shape[1], X.dtype, total_weight, class_weights)


def _numbers_of_runs(qid: Any, X: Any) -> Any:
    """Return the number of the run of equal values of each row, int64. Raises ValueError."""
    qid = column_or_1d(qid)
    check_consistent_length(X, qid)
    return np.cumsum(np.append(False, qid[1:] != qid[:-1]), dtype=np.int64)


def _data_of_source(
    estimator: Any,
    source: RowSource | LocatedRows,
    has_target: bool,
    are_classes: bool,
    reset: bool,
    others: tuple[Any, ...],
    options: Mapping[str, Any],
) -> TrainingData:
    if any(other is not None for other in others):
        names = "y, sample_weight or qid" if len(others) == 3 else "y or sample_weight"
        raise ValueError(f"X is a source of rows, and {names} is not None: its rows contain them")
    is_finite = options.get("ensure_all_finite", True) is True
    if not is_finite and hasattr(source, "with_missing_values"):
        source = source.with_missing_values("X")
    rows = mapped_rows(source, checked_parts if is_finite else partial(checked_parts, X_is_finite=False))
    found = survey(rows, are_classes, estimator.on)
    if found.is_sparse:  # only some metrics take sparse rows
        formats = options.get("accept_sparse", False)
        check_array(csr_array((1, found.num_features)), accept_sparse=formats, input_name="X")
    if has_target and "y" not in found.parts:
        raise ValueError(
            f"requires y, and the rows of {source!r} have only {', '.join(found.parts)}: "
            'name it, as in read(path, columns={"X": None, "y": "label"})'
        )
    check_features(estimator, source, found.num_features, reset)
    return TrainingData(
        rows, found.num_rows, found.num_features, found.dtype, found.total_weight, found.class_weights
    )


def as_rows(X: Any, **others: Any) -> tuple[Any, ...]:
    """Return X and the other arguments. If X is a path, or a data frame or table on a cluster, or another argument is
    the name of a column of X, then X becomes a source of rows with all of them as parts, and the others None.

        X, y, sample_weight = as_rows(X, y=y, sample_weight=sample_weight)

    The part X has all columns of numbers that are not named; of a Spark data frame or a Flink table all columns that
    are not. Raises UsageError as `read` does, and ValueError.
    """
    for name, value in {"X": X, **others}.items():
        check_not_masked(value, name)
    names = {name: value for name, value in others.items() if isinstance(value, str)}
    columns = _columns_on_cluster(X)
    if not names and not isinstance(X, (str, os.PathLike)) and not columns and not is_dask_frame(X):
        return X, *others.values()
    for name, value in others.items():
        if value is not None and name not in names:
            raise ValueError(
                f"{name} is of type {type(value).__name__}, and the rows are those of a file or a table: give the "
                "name of a column"
            )
    # With vectors and arrays, which do not count as columns of numbers.
    features = [column for column in columns if column not in names.values()] or None
    source = read(X, {"X": features, **names} if names else features)
    return source, *(None for _ in others)


def _columns_on_cluster(X: Any) -> list[str]:
    """Return the columns of a Spark data frame or a Flink table; none of others."""
    if hasattr(X, "mapInArrow"):
        return list(X.columns)
    return list(X.get_resolved_schema().get_column_names()) if is_flink_table(X) else []


def is_cluster_frame(X: Any) -> bool:
    """Return whether X is a data frame or a table on a cluster."""
    return hasattr(X, "mapInArrow") or is_dask_frame(X) or is_flink_table(X)


def check_in_memory(X: Any, method: str, remedy: str) -> None:
    """Raise ValueError if X is not in the memory of this process. `method`: what needs it; `remedy`: what to do."""
    check_not_masked(X, "X")
    if hasattr(X, "mapInArrow"):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Spark data frame are on the cluster: predict there, by "
            "ronde.ml.spark.SparkModel(model).transform(frame)"
        )
    if is_dask_frame(X):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Dask data frame are on the cluster: predict there, by "
            "frame.map_partitions(model.predict)"
        )
    if is_flink_table(X):
        raise ValueError(
            f"{method} needs rows in memory, and those of a Flink table are on the cluster: predict there, by "
            "ronde.ml.flink.with_predictions(table, model)"
        )
    if isinstance(X, (str, os.PathLike, RowSource, LocatedRows)):
        raise ValueError(f"{method} needs rows in memory, and X is {X!r}: {remedy}")


def check_features(estimator: Any, source: Any, num_features: int, reset: bool) -> None:
    """Set `n_features_in_` and `feature_names_in_` from the rows of a source, or compare them with these.

    Rows without names of columns remove `feature_names_in_`. Raises ValueError as scikit-learn does for a data frame.
    """
    # `read` knows the columns of files, of tables and of rows on a cluster; a user's source need not have any.
    names = source.columns_of("X") if hasattr(source, "columns_of") else ()
    stand_in: Any = np.empty((0, num_features))
    if len(set(names)) == num_features:  # otherwise columns contain lists, or names are unknown
        stand_in = need("pyarrow").table({name: np.empty(0) for name in names})
    validate_data(estimator, stand_in, reset=reset, skip_check_array=True)
