"""`KMeans` and `MiniBatchKMeans`: clusters of rows around k centers.

Their steps are in `lloyd` and `mini_batches`, which tasks import without scikit-learn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import cosine_distances, euclidean_distances, haversine_distances
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted

from ronde.comqueue import LocatedRows, RowSource, iterate
from ronde.comqueue.row_blocks import MOST_ROWS
from ronde.data.rows import NamedArrays
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.clustering.lloyd import (
    AssignRows,
    ChosenRows,
    LloydStep,
    RowAssignment,
    far_keys,
    final_centers,
)
from ronde.ml.clustering.mini_batches import (
    MiniBatchStep,
    add_batch,
    give_rows,
    start_among,
    weak_clusters,
)
from ronde.ml.clustering.points import GEOMETRIES, Nearest, PointReader, find_nearest, offset_of, sum_nearest
from ronde.ml.fitted_forms import ArrayForm, FittedForm, NumberForm
from ronde.ml.history import Progress
from ronde.ml.source_data import SparseRows, is_sparse
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import (
    FLOATS,
    TrainingData,
    as_rows,
    check_features,
    check_in_memory,
    is_cluster_frame,
    training_data,
)

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["KMeans", "MOST_LABELS", "MiniBatchKMeans", "keeps_labels"]

Array = NDArray[Any]

DISTANCES = {"euclidean": euclidean_distances, "cosine": cosine_distances, "haversine": haversine_distances}
RUNS_FROM_RANDOM_STARTS = 10  # of n_init="auto", as in scikit-learn
START_BATCHES = 3  # as many rows as in this number of batches are candidates for the first centers
STARTS_FROM_RANDOM_ROWS = 3  # of n_init="auto", as in scikit-learn
LEAST_SPARSE_ROWS = 256  # of a block: with fewer, calls of functions take more time
STORED_NUMBERS = 32  # of a sparse row: what the division into blocks supposes
SAMPLE = 1000  # rows that tell where the others lie
PIECE = 65536  # rows of a source that are in memory at once
MOST_LABELS = 10**8  # of rows that the tasks read: 400 MB


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
        if is_cluster_frame(X) or isinstance(X, LocatedRows):
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
        progress = self._progress(number * self.max_iter, {"X": X, "y": y})
        step = LloydStep(reader, self.n_clusters, start, number, self.max_iter, self.tol, seed, progress)
        result = iterate(
            SingleThreadedStep(step),
            data=data.rows,
            state=step.first_state(),
            max_iter=number * self.max_iter,
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


class MiniBatchKMeans(CenterEstimator):
    """k-means in steps that read a batch of rows each: faster than `KMeans`, with centers that are nearly as good.

        model = MiniBatchKMeans(n_clusters=16, random_state=0).fit(X)
        model.partial_fit(later_rows)

    A step costs little, so a few tasks pay for large batches only. Use rows that fit in memory with `fit`, and
    `partial_fit` for others. The result has the same bits for any number of tasks.

    Args:
        n_clusters: The number of centers (8).
        init: The first centers, as of `KMeans`. They are chosen among `init_size` rows, for which `"k-means||"` and
            `"k-means++"` are the same.
        n_init: How many first centers to choose, of which those with the least loss for these rows count (`"auto"`: 3
            with `init="random"` or a function, else 1). `partial_fit` chooses once.
        max_iter: How often, on average, each row is read at most (100).
        batch_size: How many rows a step reads (1024).
        tol: As of `KMeans`, for a single step; 0: how far centers move does not end the fit (0).
        max_no_improvement: The fit ends after this number of steps in which the loss, smoothed over about as many steps
            as read half of the rows, has not become lower (10). None: it goes on.
        init_size: Among how many rows the first centers are chosen (None: those of three batches, or three times
            `n_clusters` if that is more).
        compute_labels: Whether `fit` and `partial_fit` end with a pass over their rows for `labels_` and `inertia_`.
        reassignment_ratio: A cluster with less than this times the rows of the largest gets the row of the batch that
            is farthest from its center (0.01).
        metric: As of `KMeans`.
        verbose: As of `KMeans`.
        random_state: As of `KMeans`.
        on: As of `KMeans`.

    Attributes:
        cluster_centers_: The centers, an array of shape (n_clusters, n_features) and X's dtype.
        counts_: The weight of the rows that each center is the mean of, an array of shape (n_clusters,).
        labels_: The number of the center of each row of the last call, an int32 array; missing as of `KMeans`, and
            after a call with `compute_labels=False`.
        inertia_: As of `KMeans`, of the rows of the last call.
        n_iter_: How often, on average, each row was read, rounded up.
        n_steps_: How many batches there were.
        history_: A record for each step of the last `fit`: `step`, `loss` (the mean over the batch, before the centers
            moved), `moved`.
        n_features_in_: The number of columns of X.
        feature_names_in_: Their names, if X is a data frame, or what `ronde.comqueue.read` makes of a table or of
            files, and all names are strings.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **CenterEstimator._parameter_constraints,
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "max_no_improvement": [Interval(Integral, 1, None, closed="left"), None],
        "init_size": [Interval(Integral, 1, None, closed="left"), None],
        "compute_labels": ["boolean"],
        "reassignment_ratio": [Interval(Real, 0, 1, closed="left")],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **CenterEstimator._fitted_forms,
        "counts_": ArrayForm(("clusters",), ("float64",), is_needed=True),
        "n_steps_": NumberForm(is_needed=True),
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Literal["k-means||", "k-means++", "random"] | Any = "k-means||",
        n_init: int | Literal["auto"] = "auto",
        max_iter: int = 100,
        batch_size: int = 1024,
        tol: float = 0.0,
        max_no_improvement: int | None = 10,
        init_size: int | None = None,
        compute_labels: bool = True,
        reassignment_ratio: float = 0.01,
        metric: Literal["euclidean", "cosine", "haversine"] = "euclidean",
        verbose: int = 0,
        random_state: int | np.random.RandomState | None = None,
        on: str | Cluster | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.tol = tol
        self.max_no_improvement = max_no_improvement
        self.init_size = init_size
        self.compute_labels = compute_labels
        self.reassignment_ratio = reassignment_ratio
        self.metric = metric
        self.verbose = verbose
        self.random_state = random_state
        self.on = on

    @fitting
    def fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Find the centers, independent of an earlier fit; return the estimator.

        Args:
            X: As of `KMeans.fit`.
            y: Has no effect.
            sample_weight: The weight of each row (None: 1 each).

        Raises:
            ValueError: There are fewer rows than clusters, or X, a weight or a parameter is invalid.
            RemoteError: A task failed, or has ended.
        """
        data = point_data(self, X, sample_weight)
        self._check_rows(data)
        reader, size = self._reader(data), min(self.batch_size, data.num_rows)
        most_steps = max(1, self.max_iter * data.num_rows // size)
        progress = self._progress(most_steps, {"X": X, "y": y})
        step = self._step(data, reader, size, progress)
        result = iterate(
            SingleThreadedStep(step),
            data=data.rows,
            state=step.first_state(),
            max_iter=most_steps,
            on=place_of(self.on, size * data.num_features),
            finish=AssignRows(reader, keeps_labels(data)) if self.compute_labels else None,
            rows_per_block=rows_per_block(data),
        )
        self.cluster_centers_, self.counts_ = reader.rows(result.state.centers), result.state.counts
        self.n_steps_ = result.steps
        self.n_iter_ = -(-result.steps * int(size) // data.num_rows)
        if self.compute_labels:
            self._set_assignment(result.outputs)
        else:
            self._remove_assignment()
        self._end_fit(progress, result.state.records)
        return self

    @fitting
    def partial_fit(self, X: Any, y: object = None, sample_weight: Any = None) -> Self:
        """Take one step with these rows, in this process; return the estimator.

        The first call chooses the first centers among its rows.

        Args:
            X: Rows, an array or a sparse matrix of shape (n_samples, n_features); in the first call at least as many as
                clusters.
            y: Has no effect.
            sample_weight: The weight of each row (None: 1 each).

        Raises:
            ValueError: X, a weight or a parameter is invalid.
        """
        check_in_memory(
            X,
            "partial_fit",
            "read some at a time, as by ronde.comqueue.read(path).load(0, 1000), or call fit",
        )
        is_first = not hasattr(self, "cluster_centers_")
        formats = accepted_formats(self.metric)
        data = training_data(self, X, sample_weight=sample_weight, reset=is_first, accept_sparse=formats)
        dtype = data.dtype if is_first else self.cluster_centers_.dtype
        reader = PointReader(self.metric, dtype)
        points = reader.points(data.rows["X"])
        weights = np.asarray(data.rows.get("sample_weight", np.ones(data.num_rows)), np.float64)
        rows = ChosenRows(np.arange(data.num_rows), points, weights)
        if is_first:
            self._check_rows(data)
            seed = self._seed()
            start = self._start(data, reader, 1, seed)
            centers = (
                start_among(rows, self.n_clusters, start, [seed]) if isinstance(start, str) else start[0]
            )
            counts = np.zeros(self.n_clusters)
            self.n_steps_ = 0
        else:
            centers, counts = reader.points(self.cluster_centers_), self.counts_
        geometry = GEOMETRIES[self.metric]
        centers, counts = add_batch(geometry, centers, counts, sum_nearest(points, centers, weights)["sums"])
        weak = weak_clusters(counts, self.reassignment_ratio)
        if len(weak):
            farthest = rows.with_keys(far_keys(points, weights, centers)).smallest(len(weak))
            give_rows(centers, counts, weak, farthest)
        self.cluster_centers_, self.counts_ = reader.rows(centers), counts
        if self.compute_labels:
            nearest = find_nearest(points, centers, weights)
            self.labels_, self.inertia_ = nearest.labels, nearest.loss * geometry.loss_scale
        else:
            self._remove_assignment()
        self.n_steps_ += 1
        return self

    def _remove_assignment(self) -> None:
        """Remove the labels and the inertia of an earlier call."""
        for name in ("labels_", "inertia_"):
            self.__dict__.pop(name, None)

    def _step(self, data: TrainingData, reader: PointReader, size: int, progress: Progress) -> MiniBatchStep:
        number, seed = self._run_count(STARTS_FROM_RANDOM_ROWS), self._seed()
        return MiniBatchStep(
            reader,
            self.n_clusters,
            self._start(data, reader, number, seed),
            number,
            self._start_size(size),
            size,
            self.tol,
            self.max_no_improvement,
            self.reassignment_ratio,
            seed,
            progress,
        )

    def _start_size(self, batch_size: int) -> int:
        """Return among how many rows the first centers are chosen."""
        if self.init_size is None:
            return START_BATCHES * max(batch_size, self.n_clusters)
        if self.init_size < self.n_clusters:
            warnings.warn(
                f"init_size={self.init_size} should be larger than n_clusters={self.n_clusters}: {3 * self.n_clusters} "
                "rows are taken instead",
                RuntimeWarning,
                stacklevel=5,
            )
            return 3 * self.n_clusters
        return int(self.init_size)


# The rows that an estimator gets


def point_data(estimator: Any, X: Any, sample_weight: Any = None, *, reset: bool = True) -> TrainingData:
    """Check X and sample_weight as `training_data` does, but leave the rows of a source of arrays to the tasks.

    Raises ValueError and TypeError.
    """
    if not reset and is_cluster_frame(X):
        check_in_memory(X, f"a prediction of {type(estimator).__name__}", "")
    X, sample_weight = as_rows(X, sample_weight=sample_weight)
    first = X.load(0, 1) if isinstance(X, RowSource) else None
    if not reset and isinstance(X if first is None else first, LocatedRows | NamedArrays):
        raise ValueError(
            f"{X!r} has rows with several parts, or on a cluster: expected an array, or `read(path)`"
        )
    formats = accepted_formats(estimator.metric)
    if first is None or isinstance(first, NamedArrays):
        return training_data(estimator, X, sample_weight=sample_weight, reset=reset, accept_sparse=formats)
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
