"""What linear models share: predictions, classes as targets, and how a fit calls an optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.validation import check_is_fitted, validate_data

from ronde.ml.base import DistributedEstimator, overflow_message
from ronde.ml.fitted_forms import ArrayForm, ClassesForm, FittedForm
from ronde.ml.history import Progress
from ronde.ml.optimizers import Objective, Optimizer, OptimizerResult
from ronde.ml.optimizers.descent import DescentOptimizer
from ronde.ml.optimizers.optimizer import MAX_ITER
from ronde.ml.source_data import ClassWeights, is_sparse
from ronde.ml.tasks import place_of
from ronde.ml.training_data import FLOATS, TrainingData, check_in_memory

__all__ = [
    "ClassSigns",
    "FitReport",
    "LinearClassifier",
    "LinearModel",
    "LinearRegressor",
    "each_class_against_rest",
    "float_targets",
    "regression_weights",
    "split_weights",
    "weights_of_zeros",
    "with_class_numbers",
]

Array = NDArray[Any]

FLOAT32_PRECISION = 1e-5  # of the loss, if its scores are float32
READ_IN_PARTS = "read some at a time, as by ronde.comqueue.read(path, columns).load(0, 1000)"
Parts = dict[str, Any]


class LinearModel(DistributedEstimator):
    """A model whose scores are `X @ coef_.T + intercept_`."""

    coef_: Array
    intercept_: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _scores(self, X: Any) -> Array:
        """Return shape (rows,), or (rows, outputs) if `coef_` has two dimensions."""
        check_is_fitted(self)
        check_in_memory(X, f"a prediction of {type(self).__name__}", READ_IN_PARTS)
        X = validate_data(self, X, accept_sparse="csr", dtype=FLOATS, reset=False)
        scores: Array = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return scores

    def _set(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def _check_warm_start(self, expected: tuple[int, ...], of_targets: str) -> None:
        """Raise ValueError if `coef_` of the earlier fit has another shape. `of_targets`: "classes" or "outputs"."""
        if np.shape(self.coef_) != expected:
            raise ValueError(
                f"cannot start from the earlier fit: its coef_ has the shape {np.shape(self.coef_)}, and these "
                f"{of_targets} and columns need {expected}. Fit with the same number of {of_targets} and columns, or "
                "set warm_start=False"
            )

    def _minimize(
        self,
        optimizer: Optimizer,
        objective: Objective,
        data: TrainingData,
        start: Array,
        progress: Progress,
        attributes_of: Callable[[Array], Mapping[str, Any]],
        loss_factor: float = 1.0,
    ) -> OptimizerResult:
        """Run an optimizer where the user wants it; warn if it has not converged.

        `attributes_of`: returns the fitted attributes for weights, for callbacks. `loss_factor`: of the losses in the
        records, so that they have the user's units.
        """
        if isinstance(optimizer, DescentOptimizer) and data.dtype == np.float32:
            optimizer.precision = FLOAT32_PRECISION
        place = place_of(self.on, data.work)
        try:
            result = optimizer.minimize(
                objective,
                data.rows_at(place),
                start,
                on=place,
                rows_per_block=data.rows_per_block,
                report=FitReport(progress, attributes_of, loss_factor),
            )
        except FloatingPointError as error:
            raise ValueError(overflow_message(type(self).__name__, math.inf, 1)) from error
        for record in result.history:
            record["loss"] *= loss_factor
        self._warn_unless_converged(result.reason, result.n_iter, optimizer.max_iter, optimizer.tol)
        return result

    def _warn_unless_converged(self, reason: str | None, n_iter: int, max_iter: int, tol: float) -> None:
        """Warn of a fit that has ended for another reason. `reason`: as of `OptimizerResult`; None: "max_iter"."""
        if reason not in ("gradient", "loss", "precision", "report"):
            warnings.warn(
                f"{type(self).__name__} has not converged in {n_iter} steps ({reason or MAX_ITER}): raise max_iter "
                f"({max_iter}) or tol ({tol:g}), or scale the columns of X alike",
                ConvergenceWarning,
                stacklevel=6,
            )


class LinearRegressor(RegressorMixin, LinearModel):
    """A linear model of numbers."""

    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **DistributedEstimator._fitted_forms,
        "coef_": ArrayForm(("outputs", "features"), least_axes=1, is_needed=True),
        "intercept_": ArrayForm(("outputs",), least_axes=0, is_needed=True),
    }

    def predict(self, X: Any) -> Array:
        """Return the predicted numbers, shape (rows,), or (rows, outputs) if the model was fitted to several.

        Args:
            X: Shape (rows, features), an array or a SciPy matrix.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        return self._scores(X)


class LinearClassifier(ClassifierMixin, LinearModel):
    """A linear model of classes: `coef_` has one row for each, or one row in all for two classes."""

    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **DistributedEstimator._fitted_forms,
        "classes_": ClassesForm(),
        "coef_": ArrayForm(("planes", "features"), is_needed=True),
        "intercept_": ArrayForm(("planes",), is_needed=True),
    }

    classes_: Array

    def sparsify(self) -> Self:
        """Make `coef_` a sparse matrix, for many coefficients of 0; return the model. A fit needs `densify` before.

        Raises:
            NotFittedError: `fit` has not been called.
        """
        check_is_fitted(self)
        self.coef_ = csr_matrix(self.coef_)
        return self

    def densify(self) -> Self:
        """Make `coef_` an array again; return the model.

        Raises:
            NotFittedError: `fit` has not been called.
        """
        check_is_fitted(self)
        coef: Any = self.coef_
        self.coef_ = coef.toarray() if is_sparse(coef) else coef
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the scores: shape (rows,) for two classes, where a positive one stands for the second class; else
        (rows, classes).

        Args:
            X: Shape (rows, features), an array or a SciPy matrix.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Return the class with the largest score for each row.

        Args:
            X: As of `decision_function`.

        Raises:
            NotFittedError: As of `decision_function`.
            ValueError: As of `decision_function`.
        """
        scores = self.decision_function(X)
        numbers = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)
        predicted: Array = self.classes_[numbers]
        return predicted


class FitReport:
    """Tells the progress of a fit the weights as attributes of the estimator. Travels to the tasks.

    `loss_factor`: of the losses in the records.
    """

    def __init__(
        self,
        progress: Progress,
        attributes_of: Callable[[Array], Mapping[str, Any]],
        loss_factor: float = 1.0,
    ) -> None:
        self._progress, self._attributes_of, self._loss_factor = progress, attributes_of, loss_factor

    def __deepcopy__(self, memo: object) -> FitReport:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return FitReport, (self._progress, dict, self._loss_factor)

    def __call__(self, record: Mapping[str, Any], w: Array) -> bool:
        in_units = {**record, "loss": record["loss"] * self._loss_factor}
        return self._progress(in_units, lambda: self._attributes_of(w))


def float_targets(parts: dict[str, Any]) -> dict[str, Any]:
    """Return parts of the data with float64 targets: shape (rows,), or (rows, outputs) for several outputs."""
    y = np.asarray(parts["y"], np.float64)
    return {**parts, "y": y[:, 0] if y.shape[1:] == (1,) else y}


def split_weights(w: Array, fit_intercept: bool, dtype: Any) -> tuple[Array, Array]:
    """Return coefficients and intercepts of the weights of an optimizer, whose last column is the intercept."""
    if fit_intercept:
        return w[..., :-1].astype(dtype), w[..., -1].astype(dtype)
    return w.astype(dtype), np.zeros(w.shape[:-1], dtype)


def weights_of_zeros(outputs: tuple[int, ...], columns: int) -> Array:
    """Return the weights of an optimizer for such targets. `outputs`: the shape of a row of the user's y."""
    return np.zeros(columns if outputs in ((), (1,)) else (*outputs, columns))


def regression_weights(
    w: Array, fit_intercept: bool, dtype: Any, outputs: tuple[int, ...], keeps_column: bool = False
) -> dict[str, Any]:
    """Return `coef_` and `intercept_` of a regression in the shapes of scikit-learn; without intercepts, 0.0.

    `w`: as of `split_weights`. `outputs`: as of `weights_of_zeros`. `keeps_column`: whether `coef_` has two dimensions
    if y has the shape (rows, 1).
    """
    coef, intercept = split_weights(w, fit_intercept, dtype)
    rows = () if outputs == (1,) and not keeps_column else outputs
    return {
        "coef_": coef.reshape(*rows, coef.shape[-1]),
        "intercept_": intercept.reshape(outputs)[()] if fit_intercept else 0.0,
    }


def with_class_numbers(
    data: TrainingData, class_weight: Any, takes_one: bool = False
) -> tuple[TrainingData, Array]:
    """Return the data with numbers of classes as targets and weights by class, and the classes.

    `takes_one`: whether all rows may be of one class. Raises ValueError if there are too few, or class_weight names
    others.
    """
    if takes_one and data.class_weights is not None:
        classes, sums = data.class_weights
    else:
        classes, sums = _at_least_two_classes(data)
    factors = None if class_weight is None else _class_factors(class_weight, (classes, sums))
    data = data.mapped(_ClassNumbers(classes, factors))
    return replace(data, total_weight=float(sums.sum() if factors is None else factors @ sums)), classes


def each_class_against_rest(data: TrainingData, class_weight: Any) -> tuple[dict[int, TrainingData], Array]:
    """Return the data of each problem by the number of its class, and the classes.

    The targets are 1 for the rows of the class and -1 for the rest; of two classes only the second has a problem.
    Weights by class are as in scikit-learn's `LinearSVC`: with two classes each has its own; with more, a class has it
    only where it is the one against the rest.

    Raises ValueError as `with_class_numbers` does.
    """
    classes, sums = _at_least_two_classes(data)
    if len(classes) == 2:
        data, _ = with_class_numbers(data, class_weight)
        return {1: data.mapped(ClassSigns(1))}, classes
    factors = _class_factors(class_weight, (classes, sums))
    data, _ = with_class_numbers(data, None)
    problems = {}
    for number, factor in enumerate(factors.tolist()):
        total_weight = float(sums.sum() + (factor - 1) * sums[number])
        problems[number] = replace(data.mapped(ClassSigns(number, factor)), total_weight=total_weight)
    return problems, classes


def _class_factors(class_weight: Mapping[Any, float] | str | None, weights: ClassWeights) -> Array:
    """Return the factor of the weights of each class's rows.

    Raises ValueError if the parameter names a class that does not exist, and leaves one out that does.
    """
    classes, sums = weights
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str):  # "balanced"
        return np.asarray(sums.sum() / (len(classes) * np.where(sums > 0, sums, 1)))
    names = classes.tolist()
    unknown = [each for each in class_weight if each not in names]
    if unknown and not all(each in class_weight for each in names):
        raise ValueError(f"class_weight has {unknown}, and the classes are {names}: name classes that exist")
    return np.array([class_weight.get(each, 1.0) for each in names])


def _at_least_two_classes(data: TrainingData) -> ClassWeights:
    assert data.class_weights is not None
    classes, sums = data.class_weights
    if len(classes) < 2:
        raise ValueError(
            f"y has only one class, {classes.tolist()[0]!r}: a classifier needs samples of at least 2 classes"
        )
    return classes, sums


@dataclass(frozen=True)
class _ClassNumbers:
    """Replaces classes by their numbers, and weights each with its factor, if there are any."""

    classes: Array
    factors: Array | None

    def __call__(self, parts: Parts) -> Parts:
        numbers = np.searchsorted(self.classes, parts["y"])
        numbered = {**parts, "y": numbers.astype(np.float64)}
        if self.factors is not None:
            numbered["sample_weight"] = self.factors[numbers] * parts.get("sample_weight", 1.0)
        return numbered


@dataclass(frozen=True)
class ClassSigns:
    """Replaces the number of a class by 1, and others by -1: `data.mapped(ClassSigns(1))`.

    `factor`: of the weights of the rows of the class.
    """

    number: int
    factor: float = 1.0

    def __call__(self, parts: Parts) -> Parts:
        belongs = parts["y"] == self.number
        signed = {**parts, "y": np.where(belongs, 1.0, -1.0)}
        if self.factor != 1:
            signed["sample_weight"] = np.where(belongs, self.factor, 1.0) * parts.get("sample_weight", 1.0)
        return signed
