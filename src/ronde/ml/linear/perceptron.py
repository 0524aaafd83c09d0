"""`Perceptron`: planes between classes, by the perceptron's rule for all rows at once.

A step moves the weights of each class by the mean over all rows of weight * y * (x, 1), where y is 1 for the rows of
the class and -1 for others, and rows on the right side count as 0. That is gradient descent on the mean of
`PerceptronLoss` with the rate 1. Another rate would only scale the weights, because they start at 0. The columns are
standardized (`column_scaling`), because the number of steps depends on their means and scales.

The steps separate classes that a plane separates (R. Duda and P. Hart, Pattern Classification, section 5.5). For others
they never end, so the weights with the fewest mistakes are kept: S. Gallant, Perceptron-based learning algorithms, IEEE
Trans. Neural Networks 1 (1990).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import Interval, StrOptions

from ronde.comqueue import IterationStep
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.history import Progress
from ronde.ml.linear.column_scaling import ColumnScaling, moments_of
from ronde.ml.linear.linear_model import FitReport, LinearClassifier, split_weights, with_class_numbers
from ronde.ml.losses import PerceptronLoss
from ronde.ml.optimizers.objective import LinearObjective, row_chunks
from ronde.ml.tasks import iterate_fit
from ronde.ml.training_data import TrainingData, training_data

__all__ = ["Perceptron"]

Array = NDArray[Any]


class Perceptron(LinearClassifier):
    """The perceptron: planes with few rows on the wrong side; for several classes, each against the rest.

        model = Perceptron(on="local:2").fit(X, y)

    Each step reads all rows once and moves the weights of each class by the mean, over all rows, of what those on the
    wrong side ask for: gradient descent on the mean of max(0, -y * score). So a row of weight 2 is two rows, their
    order has no effect, and nothing is random; scikit-learn's estimator moves after each row. Given enough steps, it
    finds a plane that separates a class from the others, if there is one; else it keeps that of the step with the
    fewest mistakes. It works with centered columns of variance 1, for which it needs no copy of X.

    Args:
        fit_intercept: Whether there are intercepts.
        class_weight: A factor of the rows' weights for each class, as a dict; "balanced": classes weigh the same.
        max_iter: The largest number of steps.
        n_iter_no_change: The fit ends after this number of steps in which no class had fewer mistakes than before.
        warm_start: Whether a second fit starts from the coefficients of the first. Both need the same number of
            classes and columns.
        random_state: Has no effect: nothing in the fit is random.
        on: Where the tasks run, as of `ronde.comqueue.iterate` (None: threads of this process).
        verbose: Whether to print a line for each step.

    Attributes:
        classes_: The classes, sorted.
        coef_: Shape (1, features) for two classes, else (classes, features).
        intercept_: Shape (1,) or (classes,).
        n_iter_: The number of steps.
        history_: A `History` with `step`, `loss`, the part of the rows on the wrong side before the step, as a mean
            over the classes, and `best_loss`, this mean for the weights that the fit would keep.
    """

    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "fit_intercept": ["boolean"],
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        *,
        fit_intercept: bool = True,
        class_weight: Any = None,
        max_iter: int = 1000,
        n_iter_no_change: int = 100,
        warm_start: bool = False,
        random_state: Any = 0,
        on: Any = None,
        verbose: int = 0,
    ) -> None:
        self.fit_intercept, self.class_weight = fit_intercept, class_weight
        self.max_iter, self.n_iter_no_change, self.warm_start = max_iter, n_iter_no_change, warm_start
        self.random_state, self.on, self.verbose = random_state, on, verbose

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array, a data frame or a SciPy matrix; or the path of Parquet files, a
                Spark data frame, or what `ronde.comqueue.read` returns.
            y: The classes, shape (rows,): numbers or texts; or the name of a column of X, with numbers.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together, contain NaN or infinity, or y has only one class; or
                `warm_start` is True, and the earlier fit had another number of classes or columns.
            RemoteError: A task failed.
        """
        data = training_data(self, X, y, sample_weight, accept_sparse="csr", are_classes=True)
        data, classes = with_class_numbers(data, self.class_weight)
        moments = moments_of(self, data)
        scaling = ColumnScaling(moments.means, moments.scales)
        search, progress = self._search(data, classes, scaling, self.max_iter, is_new=not self.warm_start)
        self._set(self._attributes(classes, scaling.for_rows(search.best), data.dtype))
        self._end_fit(progress, search.history)
        if len(search.history) == self.max_iter and not search.has_ended(self.n_iter_no_change):
            warnings.warn(
                f"Perceptron has not converged in {self.max_iter} steps: raise max_iter, or lower "
                f"n_iter_no_change ({self.n_iter_no_change})",
                ConvergenceWarning,
                stacklevel=4,
            )
        return self

    @fitting
    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None) -> Self:
        """Take one step with these rows from the present weights, or from 0; return the model.

        It takes the columns as they are: scale them alike before.

        Args:
            X: As of `fit`.
            y: As of `fit`. Not every class has to be among them.
            classes: All classes. The first call needs them.
            sample_weight: As of `fit`.

        Raises:
            ValueError: As of `fit`; y has a class that is not among the classes, or these have changed, or are missing;
                or class_weight is "balanced", which needs all rows at once.
            RemoteError: A task failed.
        """
        is_first = not hasattr(self, "classes_")
        known = self._known_classes(classes, is_first)
        data = training_data(self, X, y, sample_weight, accept_sparse="csr", are_classes=True, reset=is_first)
        data, known = with_class_numbers(_among(known, data), self.class_weight)
        as_they_are = ColumnScaling(np.zeros(data.num_features), np.ones(data.num_features))
        search, progress = self._search(data, known, as_they_are, 1, is_new=False)
        self._set(self._attributes(known, search.w, data.dtype))
        self._end_fit(progress, search.history)
        return self

    def _known_classes(self, classes: Any, is_first: bool) -> Array:
        """Return all classes for `partial_fit`. Raises ValueError."""
        if self.class_weight == "balanced":
            raise ValueError('class_weight="balanced" needs all rows at once: give a dict, or call fit')
        if classes is None:
            if is_first:
                raise ValueError("classes is None: the first call of partial_fit needs all classes")
            return self.classes_
        known = np.unique(classes)
        if not is_first and not np.array_equal(known, self.classes_):
            raise ValueError(f"classes={known.tolist()} differ from those before, {self.classes_.tolist()}")
        return known

    def _search(
        self, data: TrainingData, classes: Array, scaling: ColumnScaling, max_iter: int, is_new: bool
    ) -> tuple[PerceptronSearch, Progress]:
        """Take steps; set `n_iter_`. `is_new`: whether to start from 0."""
        data.require_weight()
        numbers = np.array([1]) if len(classes) == 2 else np.arange(len(classes))
        w = np.zeros((len(numbers), data.num_features + self.fit_intercept))
        if not is_new and hasattr(self, "coef_"):
            self._check_warm_start((len(numbers), data.num_features), "classes")
            w[:, : data.num_features] = self.coef_
            w[:, data.num_features :] = np.reshape(self.intercept_, (-1, 1))
        progress = self._progress(max_iter, data.for_callbacks)
        report = FitReport(progress, lambda w: self._attributes(classes, scaling.for_rows(w), data.dtype))
        step = PerceptronStep(
            numbers, self.fit_intercept, scaling, data.total_weight, self.n_iter_no_change, report
        )
        start = {"search": PerceptronSearch.from_weights(scaling.for_columns(w))}
        search: PerceptronSearch = iterate_fit(step, data, start, max_iter, self.on).search
        self.n_iter_ = len(search.history)
        return search, progress

    def _attributes(self, classes: Array, w: Array, dtype: Any) -> Mapping[str, Any]:
        coef, intercept = split_weights(w, self.fit_intercept, dtype)
        return {"classes_": classes, "coef_": coef, "intercept_": intercept}


def _among(known: Array, data: TrainingData) -> TrainingData:
    """Return the data with all known classes, of which some may have no rows. Raises ValueError for others."""
    assert data.class_weights is not None
    found, weights = data.class_weights
    if unknown := sorted(set(found.tolist()) - set(known.tolist())):
        raise ValueError(f"y has the classes {unknown}, and all classes are {known.tolist()}")
    sums = np.zeros(len(known))
    sums[np.searchsorted(known, found)] = weights
    return replace(data, class_weights=(known, sums))


@dataclass
class PerceptronSearch:
    """Where the steps are; the same on all tasks.

    Attributes:
        w: The newest weights, of standardized columns, shape (classes, columns); one row for two classes.
        best: Those with the fewest mistakes.
        mistakes: How large a part of all rows is on the wrong side of `best`, for each class.
        idle_steps: How many steps have found nothing better.
        history: The records of all steps.
    """

    w: Array
    best: Array
    mistakes: Array
    idle_steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def from_weights(cls, w: Array) -> PerceptronSearch:
        """Return where the first step starts."""
        return cls(w, w, np.ones(len(w)))

    def move(self, mistakes: Array, gradient: Array) -> None:
        """Keep the weights of each class if they are the best so far, and move on."""
        is_better = mistakes < self.mistakes
        self.best = np.where(is_better[:, None], self.w, self.best)
        self.mistakes = np.minimum(mistakes, self.mistakes)
        self.idle_steps = 0 if is_better.any() else self.idle_steps + 1
        self.w = self.w - gradient
        # With all rows wrong, it is no best.
        self.best = np.where(self.mistakes[:, None] < 1, self.best, self.w)
        losses = {"loss": float(mistakes.mean()), "best_loss": float(self.mistakes.mean())}
        self.history.append({"step": len(self.history) + 1, **losses})

    def has_ended(self, patience: int) -> bool:
        """Return whether all rows are on the right side, or this number of steps has found nothing better."""
        return not self.mistakes.any() or self.idle_steps >= patience


class PerceptronStep:
    """The step of the iteration.

    Args:
        numbers: Of the classes that have weights.
        fit_intercept: Whether the last column of the weights is an intercept.
        scaling: Of the columns.
        total_weight: The sum of the weights of all rows.
        patience: As of `PerceptronSearch.has_ended`.
        report: Gets the record of each step and the best weights, on task 0; returns whether the fit shall end.
    """

    def __init__(
        self,
        numbers: Array,
        fit_intercept: bool,
        scaling: ColumnScaling,
        total_weight: float,
        patience: int,
        report: Callable[[Mapping[str, float], Array], bool],
    ) -> None:
        self._numbers, self._total_weight, self._patience = numbers, total_weight, patience
        self._scaling = scaling
        self._objective = LinearObjective(PerceptronLoss(), fit_intercept=fit_intercept)
        self._report = report

    def __call__(self, c: IterationStep) -> None:
        search: PerceptronSearch = c.state.search
        w = self._scaling.for_rows(search.w)
        mistakes, gradient = c.sum_blocks(lambda block: self._mistakes_and_gradient(block, w))
        search.move(mistakes / self._total_weight, self._scaling.gradient(gradient) / self._total_weight)
        should_stop = c.task_id == 0 and self._report(search.history[-1], search.best)
        c.stop_if(search.has_ended(self._patience) or should_stop)

    def _mistakes_and_gradient(self, block: Any, w: Array) -> tuple[Array, Array]:
        """Return the sum of the weights of the rows on the wrong side, for each class, and the gradient."""
        mistakes, gradient = np.zeros(len(w)), np.zeros(w.shape)
        for chunk in row_chunks(block):
            signs = np.where(chunk.y[:, None] == self._numbers, 1.0, -1.0)
            is_wrong = signs * self._objective.scores(chunk.X, w) <= 0
            slopes = chunk.weighted(np.where(is_wrong, -signs, 0.0))
            mistakes += np.abs(slopes).sum(axis=0)
            self._objective.add_gradient(gradient, chunk.X, slopes)
        return mistakes, gradient
