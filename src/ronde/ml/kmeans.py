"""`KMeans`: clusters of rows around k centers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import cosine_distances, euclidean_distances, haversine_distances
from sklearn.utils import check_array, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.comqueue import iterate
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.clustering.block_points import PointReader, offset_of
from ronde.ml.clustering.center_assignment import Nearest, find_nearest
from ronde.ml.clustering.geometry import GEOMETRIES
from ronde.ml.clustering.lloyd import (
    AssignRows,
    LloydStep,
    RowAssignment,
    Runs,
    final_centers,
    first_state,
)
from ronde.ml.clustering.point_data import (
    MOST_LABELS,
    accepted_formats,
    is_here,
    keeps_labels,
    point_data,
    rows_for_offset,
    rows_in_pieces,
    rows_per_block,
)
from ronde.ml.fitted_forms import ArrayForm, FittedForm, NumberForm
from ronde.ml.row_arguments import check_in_memory, is_on_cluster
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import TrainingData

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["CenterEstimator", "KMeans"]

Array = NDArray[Any]

DISTANCES = {"euclidean": euclidean_distances, "cosine": cosine_distances, "haversine": haversine_distances}
RUNS_FROM_RANDOM_STARTS = 10  # of n_init="auto", as in scikit-learn


class CenterEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, DistributedEstimator):
    """What estimators of k-means have in common: the parameters, and all that needs only the centers.

    Attributes:
        cluster_centers_: The centers, an array of shape (n_clusters, n_features) and X's dtype.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **DistributedEstimator._parameter_constraints,
        "n_clusters": [Interval(Integral, 1, None, closed="left")],
        "init": [StrOptions({"k-means||", "k-means++", "random"}), callable, "array-like"],
        "metric": [StrOptions(set(GEOMETRIES))],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "n_init": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **DistributedEstimator._fitted_forms,
        "cluster_centers_": ArrayForm(("clusters", "features"), is_needed=True),
        "labels_": ArrayForm(("rows",), ("int32",)),
        "inertia_": NumberForm(is_int=False),
    }

    cluster_centers_: Array

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say why an attribute is missing. Raises AttributeError."""
            if name == "labels_" and "cluster_centers_" in vars(self):
                if not vars(self).get("compute_labels", True):
                    raise AttributeError(
                        f"this {type(self).__name__} has no labels_: compute_labels is False"
                    )
                raise AttributeError(
                    f"this {type(self).__name__} has no labels_: fits keep none of rows on a cluster, or of more than "
                    f"{MOST_LABELS:,} rows in files. Predict them: a Spark data frame by "
                    "ronde.ml.spark.SparkModel(model).transform(frame), a Flink table by "
                    "ronde.ml.flink.with_predictions(table, model), files piece by piece by "
                    "model.predict(ronde.comqueue.read(path).load(begin, end))"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def fit_predict(self, X: Any, y: object = None, sample_weight: Any = None) -> Array:
        """Fit, and return the number of the cluster of each row.

        Args:
            X: As of `fit`.
            y: Has no effect.
            sample_weight: As of `fit`.

        Raises:
            ValueError: As of `fit`; or the rows are on a cluster, or more than 100,000,000 in files: see `labels_`.
            RemoteError: As of `fit`.
        """
        if is_on_cluster(X):
            check_in_memory(
                X, f"fit_predict of {type(self).__name__}", "call fit, and predict on the cluster"
            )
        self.fit(X, sample_weight=sample_weight)
        labels: Array = self.labels_ if hasattr(self, "labels_") else self.predict(X)
        return labels

    def predict(self, X: Any) -> Array:
        """Return the number of the nearest center of each row, as an int32 array of shape (n_samples,).

        Args:
            X: Rows: an array or a sparse matrix of shape (n_samples, n_features), or a `RowSource`.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X is invalid.
        """
        check_is_fitted(self)
        data = point_data(self, X, reset=False)
        return np.concatenate([self._nearest(rows).labels for rows in rows_in_pieces(data)])

    def transform(self, X: Any) -> Array:
        """Return the distance of each row to each center, an array of shape (n_samples, n_clusters).

        Args:
            X: As of `predict`.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X is invalid.
        """
        check_is_fitted(self)
        data, distances = point_data(self, X, reset=False), DISTANCES[self.metric]
        return np.concatenate([distances(rows, self.cluster_centers_) for rows in rows_in_pieces(data)])

    def score(self, X: Any, y: object = None, sample_weight: Any = None) -> float:
        """Return the negative of what `inertia_` would be for these rows and the centers of the last fit.

        Args:
            X: As of `predict`.
            y: Has no effect.
            sample_weight: The weight of each row (None: 1 each).

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X or a weight is invalid.
        """
        check_is_fitted(self)
        data = point_data(self, X, sample_weight, reset=False)
        weights = data.rows.get("sample_weight", np.ones(data.num_rows))
        distances = [self._nearest(rows).squared_distances for rows in rows_in_pieces(data)]
        return -float(np.concatenate(distances) @ weights) * GEOMETRIES[self.metric].loss_scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = bool(accepted_formats(self.metric))
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)

    def _nearest(self, rows: Any) -> Nearest:
        reader = PointReader(self.metric, rows.dtype)
        return find_nearest(reader.points(rows), reader.points(self.cluster_centers_))

    def _check_rows(self, data: TrainingData) -> None:
        """Raise ValueError if there are fewer rows than clusters, or the metric does not take rows in memory."""
        if data.num_rows < self.n_clusters:
            raise ValueError(
                f"n_samples={data.num_rows} should be >= n_clusters={self.n_clusters}: give more rows, or ask for "
                "fewer clusters"
            )
        X = data.rows["X"] if isinstance(data.rows, Mapping) else None
        if is_here(X) and self.metric != "euclidean":
            GEOMETRIES[self.metric].points(X)

    def _reader(self, data: TrainingData) -> PointReader:
        """Return what makes points of the rows of a fit."""
        reader = PointReader(self.metric, data.dtype)
        if self.metric == "euclidean" and data.dtype == np.float32:
            sample = rows_for_offset(data)
            return reader if sample is None else replace(reader, offset=offset_of(sample))
        return reader

    def _start(self, data: TrainingData, reader: PointReader, runs: int, seed: int) -> list[Array] | str:
        """Return the first centers of each run as points, or the name of the way to draw them. Raises ValueError."""
        if isinstance(self.init, str):
            return self.init
        if not callable(self.init):
            return [self._checked_start(self.init, data, reader)]
        X = data.rows["X"] if isinstance(data.rows, Mapping) else None
        if not is_here(X):
            raise ValueError(
                "init is a function, which gets all rows as an array, and the tasks read those of X themselves: give "
                'an array, or "k-means++"'
            )
        random = np.random.RandomState(seed)
        starts = [self.init(X, self.n_clusters, random_state=random) for _ in range(runs)]
        return [self._checked_start(start, data, reader) for start in starts]

    def _checked_start(self, start: Any, data: TrainingData, reader: PointReader) -> Array:
        rows = check_array(start, dtype=data.dtype, order="C", copy=True, input_name="init")
        expected = (self.n_clusters, data.num_features)
        if rows.shape != expected:
            origin = "the result of init" if callable(self.init) else "init"
            wrong = "clusters" if len(rows) != self.n_clusters else "features of the data"
            raise ValueError(
                f"The shape of the initial centers {rows.shape} does not match the number of {wrong}: {origin} has the "
                f"shape {rows.shape}: expected {expected}, one row for each of the {self.n_clusters} clusters"
            )
        start_points: Array = reader.points(rows)
        return start_points

    def _run_count(self, automatic: int) -> int:
        """Return how often first centers are chosen. `automatic`: of n_init="auto", by `init` a draw or a function."""
        if not (isinstance(self.init, str) or callable(self.init)):
            if self.n_init not in ("auto", 1):
                warnings.warn(
                    f"Explicit initial center position passed: performing only one init in {type(self).__name__} "
                    f"instead of n_init={self.n_init}, which has no effect",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return 1
        if self.n_init != "auto":
            return int(self.n_init)
        return automatic if self.init == "random" or callable(self.init) else 1

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _set_assignment(self, outputs: Sequence[RowAssignment]) -> None:
        """Set `inertia_` and `labels_`, and warn if there are clusters without rows. `outputs`: by task."""
        self.inertia_, found = outputs[0].loss, outputs[0].num_found
        labels = [each.labels for each in outputs if each.labels is not None]
        self.__dict__.pop("labels_", None)  # of an earlier fit
        if labels:
            self.labels_ = np.concatenate(labels)
        if found < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({found}) found smaller than n_clusters ({self.n_clusters}). Possibly "
                "due to duplicate points in X.",
                ConvergenceWarning,
                stacklevel=3,
            )


class KMeans(CenterEstimator):
    """Finds k centers such that the squared distances of all rows to their nearest centers are small.

        model = KMeans(n_clusters=16, random_state=0, on="local:2").fit(X)
        model.labels_, model.cluster_centers_

    It is Lloyd's algorithm, with scikit-learn's interface. Each step reads the rows once, in all tasks. The result has
    the same bits for any number of tasks and wherever they run, on all processors.

    A cluster that loses all its rows gets the row that is farthest from its center.

    Args:
        n_clusters: The number of centers (8).
        init: The first centers: `"k-means||"` draws them far from each other, in few passes over the rows;
            `"k-means++"` likewise, but with a pass for each center if there are more than 8,192 rows; `"random"` draws
            rows. Or an array of shape (n_clusters, n_features); or a function of X, `n_clusters` and `random_state`
            that returns one, for rows in memory.
        n_init: How many runs from different starts, of which the best counts (`"auto"`: 10 with `init="random"` or a
            function, else 1).
        max_iter: How many steps a run has at most (300).
        tol: A run ends when the squared distance by which its centers move, all together, is at most this times the
            mean variance of the columns (1e-4).
        algorithm: Has no effect: scikit-learn's `"lloyd"` and `"elkan"` find the same centers (`"lloyd"`).
        metric: `"euclidean"`; `"cosine"`, one minus the cosine of the angle; or `"haversine"`, the angle between points
            on the globe, for rows of latitude and longitude in radians. With the latter two, centers are means of
            directions.
        verbose: Whether to print a line for each step to standard error (0).
        random_state: An int for the same result in each fit; or a `numpy.random.RandomState`.
        on: Where the tasks run, as of `ronde.comqueue.iterate`: `"local:2"`, `"spark:8"` (None: the ranks of this job,
            or threads of this process).

    Attributes:
        cluster_centers_: The centers, an array of shape (n_clusters, n_features) and X's dtype.
        labels_: The number of the center of each row, an int32 array of shape (n_samples,). Missing if the rows are on
            a cluster (a Spark data frame, a Flink table), where they have no order, or more than 100,000,000 in files.
        inertia_: The sum over rows of weight times squared distance to the center; with `"cosine"` of weight times one
            minus the cosine, with `"haversine"` of weight times the haversine of the angle, which is its half's squared
            sine.
        n_iter_: The number of steps of the best run.
        history_: A record for each step: `step`, `loss` (before the centers moved), `moved` (the squared distance by
            which the centers moved, all together), `run`.
        n_features_in_: The number of columns of X.
        feature_names_in_: Their names, if X is a data frame, or what `ronde.comqueue.read` makes of a table or of
            files, and all names are strings.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **CenterEstimator._parameter_constraints,
        "algorithm": [StrOptions({"lloyd", "elkan"})],
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Literal["k-means||", "k-means++", "random"] | Any = "k-means||",
        n_init: int | Literal["auto"] = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        algorithm: Literal["lloyd", "elkan"] = "lloyd",
        metric: Literal["euclidean", "cosine", "haversine"] = "euclidean",
        verbose: int = 0,
        random_state: int | np.random.RandomState | None = None,
        on: str | Cluster | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.algorithm = algorithm
        self.metric = metric
        self.verbose = verbose
        self.random_state = random_state
        self.on = on

    @fitting
    def fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Find the centers; return the estimator.

        Args:
            X: Rows: an array, a data frame or (except with `"haversine"`) a sparse matrix of shape (n_samples,
                n_features), float64 or float32 (others become float64); the path of Parquet files, a Spark data frame,
                or what `ronde.comqueue.read` returns.
            y: Has no effect.
            sample_weight: The weight of each row (None: 1 each); or the name of a column of X.

        Raises:
            ValueError: There are fewer rows than clusters, or X, a weight or a parameter is invalid.
            RemoteError: A task failed, or has ended.
        """
        data = point_data(self, X, sample_weight)
        self._check_rows(data)
        reader = self._reader(data)
        number, seed = self._run_count(RUNS_FROM_RANDOM_STARTS), self._seed()
        start = self._start(data, reader, number, seed)
        runs = Runs(reader, self.n_clusters, start, number, self.max_iter, self.tol, seed)
        progress = self._progress(runs.number * self.max_iter, {"X": X, "y": y})
        result = iterate(
            SingleThreadedStep(LloydStep(runs, progress)),
            data=data.rows,
            state=first_state(),
            max_iter=runs.number * self.max_iter,
            on=place_of(self.on, data.size),
            finish=AssignRows(reader, keeps_labels(data)),
            rows_per_block=rows_per_block(data),
        )
        state = result.state
        self.cluster_centers_ = reader.rows(final_centers(state))
        self.n_iter_ = state.steps if state.best is None else state.best_steps
        self._set_assignment(result.outputs)
        self._end_fit(progress, state.records)
        return self
