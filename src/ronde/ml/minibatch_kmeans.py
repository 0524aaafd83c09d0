"""`MiniBatchKMeans`: k-means whose steps read only some of the rows, or that gets its rows in parts."""

from __future__ import annotations

import warnings
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils._param_validation import Interval

from ronde.comqueue import iterate
from ronde.ml.base import fitting
from ronde.ml.clustering.block_points import PointReader
from ronde.ml.clustering.center_assignment import find_nearest, sum_nearest
from ronde.ml.clustering.chosen_rows import ChosenRows
from ronde.ml.clustering.empty_clusters import far_keys
from ronde.ml.clustering.geometry import GEOMETRIES
from ronde.ml.clustering.lloyd import AssignRows
from ronde.ml.clustering.mini_batches import (
    Batches,
    MiniBatchStep,
    add_batch,
    first_state,
    give_rows,
    start_among,
    weak_clusters,
)
from ronde.ml.clustering.point_data import accepted_formats, keeps_labels, point_data, rows_per_block
from ronde.ml.fitted_forms import ArrayForm, FittedForm, NumberForm
from ronde.ml.kmeans import CenterEstimator
from ronde.ml.row_arguments import check_in_memory
from ronde.ml.tasks import SingleThreadedStep, place_of
from ronde.ml.training_data import TrainingData, training_data

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["MiniBatchKMeans"]

Array = NDArray[Any]

START_BATCHES = 3  # as many rows as in this number of batches are candidates for the first centers
STARTS_FROM_RANDOM_ROWS = 3  # of n_init="auto", as in scikit-learn


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
        result = iterate(
            SingleThreadedStep(MiniBatchStep(self._batches(data, reader, size), progress)),
            data=data.rows,
            state=first_state(),
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

    def _batches(self, data: TrainingData, reader: PointReader, size: int) -> Batches:
        number, seed = self._run_count(STARTS_FROM_RANDOM_ROWS), self._seed()
        return Batches(
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
