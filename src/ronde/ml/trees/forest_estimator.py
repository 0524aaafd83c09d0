"""What the estimators of forests have in common: how they fit, predict and count the rows that a tree has not drawn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils._param_validation import Interval, RealNotInt, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.comqueue import iterate
from ronde.ml.base import fitting
from ronde.ml.fitted_forms import ArrayForm, ClassesForm, FittedForm, NumberForm, Sizes
from ronde.ml.history import History, Progress
from ronde.ml.linear.linear_model import float_targets, with_class_numbers
from ronde.ml.tasks import can_lose_a_task
from ronde.ml.training_data import TrainingData, check_in_memory
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.forests import ForestRules, ForestStep, check_forest_rows, first_forest_state
from ronde.ml.trees.tree_estimator import READ_IN_PARTS, TreeEstimator
from ronde.ml.trees.trees import (
    TreesForm,
    add_predictions,
    find_leaves,
    joined_trees,
    split_trees,
    thread_count,
)

__all__ = ["ForestOfClasses", "ForestOfNumbers"]

Array = NDArray[Any]

STEPS_OF_FIT = 4  # each ends with an exchange of trees, and perhaps a checkpoint
CRITERIA = {"gini": 0, "entropy": 1, "log_loss": 1, "squared_error": 2}


@dataclass(frozen=True)
class ForestClassesForm(ClassesForm):
    """The classes, of which leaves have a share each."""

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if problem := super().problem(value, sizes):
            return problem
        sizes["values"] = len(value)
        return None


@dataclass(frozen=True)
class ForestTreesForm(TreesForm):
    """The trees of a forest, whose leaves have a value for each class, or one."""

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        sizes.setdefault(self.scores, 1)
        if problem := super().problem(value, sizes):
            return problem
        if value["value"].shape[1] != sizes[self.scores] or not len(value["scores"]):
            return f"has not {sizes[self.scores]} values for each node, or no trees"
        return None


class Forest(TreeEstimator):
    """What all forests have in common."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **TreeEstimator._parameter_constraints,
        "n_estimators": [Interval(Integral, 1, None, closed="left")],
        "min_samples_split": [
            Interval(Integral, 2, None, closed="left"),
            Interval(RealNotInt, 0.0, 1.0, closed="right"),
        ],
        "min_samples_leaf": [
            Interval(Integral, 1, None, closed="left"),
            Interval(RealNotInt, 0.0, 1.0, closed="neither"),
        ],
        "min_weight_fraction_leaf": [Interval(Real, 0.0, 0.5, closed="both")],
        "max_features": [
            Interval(Integral, 1, None, closed="left"),
            Interval(RealNotInt, 0.0, 1.0, closed="right"),
            StrOptions({"sqrt", "log2"}),
            None,
        ],
        "min_impurity_decrease": [Interval(Real, 0.0, None, closed="left")],
        "bootstrap": ["boolean"],
        "oob_score": ["boolean", callable],
        "max_samples": [
            None,
            Interval(RealNotInt, 0.0, 1.0, closed="right"),
            Interval(Integral, 1, None, closed="left"),
        ],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **TreeEstimator._fitted_forms,
        "trees_": ForestTreesForm("values"),
        "oob_score_": NumberForm(is_int=False),
    }
    _is_extra_random: ClassVar[bool] = False

    @property
    def feature_importances_(self) -> Array:
        """How much the splits of each column lower the impurity, with the sum 1; float64 of shape (features,).

        Columns with many different values have larger ones. `sklearn.inspection.permutation_importance` is without
        this bias.
        """
        check_is_fitted(self)
        trees, width = self.trees_, self.n_features_in_
        is_split = trees["column"] >= 0
        owners = np.repeat(np.arange(len(trees["scores"])), np.diff(trees["roots"]))[is_split]
        places = owners * width + trees["column"][is_split]
        by_tree = np.bincount(places, trees["gain"][is_split], minlength=len(trees["scores"]) * width)
        by_tree = by_tree.reshape(-1, width).astype(float)  # NumPy counts of no splits are integers
        sums = by_tree.sum(axis=1, keepdims=True)
        shares = np.divide(by_tree, sums, out=np.zeros_like(by_tree), where=sums > 0).mean(axis=0)
        return np.asarray(shares / shares.sum() if shares.sum() > 0 else shares)

    def apply(self, X: Any) -> Array:
        """Return the number of the leaf of each row in each tree, int32 of shape (rows, trees).

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        bins, binned, rows, threads = self._binned(X)
        return find_leaves(self.trees_, bins, binned, rows, threads)

    def _fit(
        self, data: TrainingData, class_count: int, categories: dict[str, Array], others: Mapping[str, Any]
    ) -> Self:
        """Grow the trees. `categories`: of data frames; `others`: fitted attributes that are known before."""
        data.require_weight()
        check_forest_rows(data.num_rows)
        is_warm = self._is_warm
        earlier = len(self.trees_["scores"]) if is_warm else 0
        rules = self._rules(data, class_count, categories, earlier)
        others = {**others, "seed_": rules.seed, **({"categories_": categories} if categories else {})}
        progress = self._progress(STEPS_OF_FIT, data.for_callbacks)
        if earlier == rules.num_trees:
            warnings.warn(
                "Warm-start fitting without increasing n_estimators does not fit new trees.", stacklevel=4
            )
        if earlier < rules.num_trees or (rules.has_oob and not hasattr(self, "oob_score_")):
            state = self._grown(data, rules, is_warm, progress, others)
            for name in ("categories_", "oob_score_", "oob_decision_function_", "oob_prediction_"):
                self.__dict__.pop(name, None)
            for name, value in self._attributes(state, others).items():
                setattr(self, name, value)
            if state.oob is not None:
                self._set_oob(state.oob, data)
        progress.end()
        return self

    def _grown(
        self,
        data: TrainingData,
        rules: ForestRules,
        is_warm: bool,
        progress: Progress,
        others: Mapping[str, Any],
    ) -> Any:
        """Return the state after the last step, and set `history_`."""
        state = (
            first_forest_state(Bins(**self.bins_), split_trees(self.trees_))
            if is_warm
            else first_forest_state()
        )
        earlier = list(self.history_) if is_warm else []
        place = self._place(data)
        ended = iterate(
            ForestStep(rules, ForestProgress(progress, lambda state: self._attributes(state, others))),
            data=data.rows_at(place),
            state=state,
            max_iter=rules.num_trees,
            on=place,
            rows_per_block=self._rows_per_block(data),
            checkpoint_every=1 if can_lose_a_task(place) else None,
        ).state
        first = len(state["trees"])
        records: list[dict[str, Any]] = []
        for begin in range(first, len(ended.trees), rules.trees_of_step):
            some = ended.trees[begin : begin + rules.trees_of_step]
            leaves = sum(int((tree["column"] < 0).sum()) for tree in some) / len(some)
            records.append(
                {"step": len(earlier) + len(records) + 1, "trees": begin + len(some), "leaves": leaves}
            )
        self.history_ = History([*earlier, *records])
        return ended

    def _attributes(self, state: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fitted attributes for a state."""
        values = state.trees[0]["value"].shape[1]
        return {**others, "bins_": state.bins, "trees_": joined_trees(state.trees, 1, values)}

    def _set_oob(self, means: Array, data: TrainingData) -> None:
        """Set the attributes of the rows that trees have not drawn. `means`: float64 of shape (rows, values)."""
        if np.isnan(means).any():
            warnings.warn(
                "Some inputs do not have OOB scores. This probably means too few trees were used to compute any "
                "reliable OOB estimates.",
                stacklevel=5,
            )
        if isinstance(data.rows, Mapping):
            is_known = ~np.isnan(means).any(axis=1)
            if is_known.any():
                self.oob_score_ = self._score_of(data.rows["y"][is_known], means[is_known])

    def _score_of(self, y: Array, means: Array) -> float:
        raise NotImplementedError

    def _oob_function(self, default: Callable[..., Any]) -> Callable[..., Any]:
        return self.oob_score if callable(self.oob_score) else default

    def _rules(
        self, data: TrainingData, class_count: int, categories: Mapping[str, Array], earlier: int
    ) -> ForestRules:
        if self.n_estimators < earlier:
            raise ValueError(
                f"n_estimators={self.n_estimators} must be larger or equal to the {earlier} trees of the earlier fit "
                "when warm_start==True"
            )
        if self.oob_score and not self.bootstrap:
            raise ValueError("Out of bag estimation only available if bootstrap=True")
        if self.max_samples is not None and not self.bootstrap:
            raise ValueError(
                "`max_samples` cannot be set if `bootstrap=False`: set it to None, or bootstrap=True"
            )
        values = max(1, class_count)
        if earlier and (
            self.trees_["value"].shape[1] != values or len(self.bins_["is_categorical"]) != data.num_features
        ):
            raise ValueError(
                "cannot start from the earlier fit, which had another number of classes or columns: fit with the same, "
                "or set warm_start=False"
            )
        return ForestRules(
            class_count,
            CRITERIA[self.criterion],
            self.n_estimators,
            max(1, -(-(self.n_estimators - earlier) // STEPS_OF_FIT)),
            self.max_leaf_nodes,
            self.max_depth,
            _row_count(self.min_samples_leaf, data.num_rows, 1),
            _row_count(self.min_samples_split, data.num_rows, 2),
            float(self.min_weight_fraction_leaf),
            float(self.min_impurity_decrease),
            _column_count(self.max_features, data.num_features),
            self._is_extra_random,
            self._draws(data.num_rows),
            bool(self.oob_score),
            self.max_bins,
            self._is_categorical(data, categories),
            self._seed(),
        )

    def _draws(self, num_rows: int) -> float | int | None:
        if not self.bootstrap:
            return None
        if self.max_samples is None:
            return 1.0
        if isinstance(self.max_samples, Integral):
            if int(self.max_samples) > num_rows:
                raise ValueError(
                    f"`max_samples` must be <= n_samples={num_rows} but got value {self.max_samples}"
                )
            return int(self.max_samples)
        return max(float(self.max_samples), 1 / num_rows)

    def _binned(self, X: Any) -> tuple[Bins, Array, int, int]:
        """Return the bins, those of rows, the number of rows, and how many threads pay. Raises as `apply`."""
        check_is_fitted(self)
        check_in_memory(X, f"a prediction of {type(self).__name__}", READ_IN_PARTS)
        X, bins = self._checked_rows(X), Bins(**self.bins_)
        threads = thread_count(X.shape[0] * len(self.trees_["scores"]))
        return bins, bins.of(X, threads), X.shape[0], threads

    def _means(self, X: Any) -> Array:
        """Return the means of the leaves of all trees, float64 of shape (rows, values)."""
        bins, binned, rows, threads = self._binned(X)
        means = np.zeros((rows, self.trees_["value"].shape[1]))
        add_predictions(self.trees_, bins, binned, means, threads)
        means /= len(self.trees_["scores"])
        return means


class ForestProgress:
    """Tells the progress of a fit its records, and the attributes of the estimator. Travels to the tasks."""

    def __init__(self, progress: Progress, attributes_of: Any) -> None:
        self._progress, self._attributes_of = progress, attributes_of

    def __deepcopy__(self, memo: object) -> ForestProgress:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ForestProgress, (self._progress, dict)

    def __call__(self, record: Mapping[str, Any], state: Any) -> bool:
        return self._progress(record, lambda: self._attributes_of(state))


def _row_count(given: float | int, num_rows: int, least: int) -> int:
    return int(given) if isinstance(given, Integral) else max(least, math.ceil(given * num_rows))


def _column_count(given: float | int | str | None, columns: int) -> int:
    if given is None:
        return columns
    if isinstance(given, str):
        return max(1, int(math.sqrt(columns) if given == "sqrt" else math.log2(columns)))
    return min(columns, int(given)) if isinstance(given, Integral) else max(1, int(given * columns))


class ForestOfClasses(ClassifierMixin, Forest):
    """What the forests of classes have in common."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **Forest._parameter_constraints,
        "criterion": [StrOptions({"gini", "entropy", "log_loss"})],
        "class_weight": [dict, StrOptions({"balanced"}), None],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        "classes_": ForestClassesForm(least=1),  # before the trees, which are compared with them
        **Forest._fitted_forms,
        "oob_decision_function_": ArrayForm(("rows", "values"), ("float64",)),
    }

    classes_: Array

    @property
    def n_classes_(self) -> int:
        """How many classes there are."""
        check_is_fitted(self)
        return len(self.classes_)

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array or a data frame, in which NaN is a missing value; or the path of Parquet
                files, a Spark data frame, or what `ronde.comqueue.read` returns.
            y: The classes, shape (rows,): numbers or texts; or the name of a column of X, with numbers.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together.
            RemoteError: A task failed.
        """
        data, categories = self._data(X, y, sample_weight, are_classes=True)
        data, classes = with_class_numbers(data, self.class_weight, takes_one=True)
        return self._fit(data, len(classes), categories, {"classes_": classes})

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class, float64 of shape (rows, classes): the mean share in the leaves.

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        return self._means(X)

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of each class, float64 of shape (rows, classes).

        Args:
            X: As of `predict_proba`.

        Raises:
            NotFittedError: As of `predict_proba`.
            ValueError: As of `predict_proba`.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self._means(X)))

    def predict(self, X: Any) -> Array:
        """Return the most likely class of each row.

        Args:
            X: As of `predict_proba`.

        Raises:
            NotFittedError: As of `predict_proba`.
            ValueError: As of `predict_proba`.
        """
        means = self._means(X)
        return np.asarray(self.classes_[means.argmax(axis=1)])

    def _set_oob(self, means: Array, data: TrainingData) -> None:
        super()._set_oob(means, data)
        self.oob_decision_function_ = means

    def _score_of(self, y: Array, means: Array) -> float:
        return float(self._oob_function(accuracy_score)(y, means.argmax(axis=1)))


class ForestOfNumbers(RegressorMixin, Forest):
    """What the forests of numbers have in common."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **Forest._parameter_constraints,
        "criterion": [StrOptions({"squared_error"})],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **Forest._fitted_forms,
        "oob_prediction_": ArrayForm(("rows",), ("float64",)),
    }

    @fitting
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model; return it.

        Args:
            X: Shape (rows, features), an array or a data frame, in which NaN is a missing value; or the path of Parquet
                files, a Spark data frame, or what `ronde.comqueue.read` returns.
            y: The targets, shape (rows,); or the name of a column of X.
            sample_weight: Shape (rows,), not negative (None: 1 for each row); or the name of a column of X.

        Raises:
            ValueError: The arguments do not fit together.
            RemoteError: A task failed.
        """
        data, categories = self._data(X, y, sample_weight, y_numeric=True)
        return self._fit(data.mapped(float_targets), 0, categories, {})

    def predict(self, X: Any) -> Array:
        """Return the predicted numbers, float64 of shape (rows,): the mean of the leaves of all trees.

        Args:
            X: Shape (rows, features), an array or a data frame.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        return self._means(X)[:, 0]

    def _set_oob(self, means: Array, data: TrainingData) -> None:
        super()._set_oob(means, data)
        self.oob_prediction_ = means[:, 0]

    def _score_of(self, y: Array, means: Array) -> float:
        return float(self._oob_function(r2_score)(y, means[:, 0]))
