"""What the estimators of boosting have in common: parameters, the course of a fit, scores, saving."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import check_scoring
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.comqueue import iterate
from ronde.ml.fitted_forms import ArrayForm, FittedForm, Sizes
from ronde.ml.history import Progress
from ronde.ml.tasks import can_lose_a_task
from ronde.ml.training_data import TrainingData, check_in_memory
from ronde.ml.trees.bins import Bins
from ronde.ml.trees.boosting import BoostingRules, BoostingStep, first_state, record_of
from ronde.ml.trees.growing import TreeRules, check_row_count
from ronde.ml.trees.lightgbm_text import lightgbm_model
from ronde.ml.trees.losses import BoostingLoss
from ronde.ml.trees.tree_estimator import READ_IN_PARTS, TreeEstimator
from ronde.ml.trees.trees import (
    TreesForm,
    add_predictions,
    add_shap_values,
    joined_trees,
    some_trees,
    split_trees,
    thread_count,
)
from ronde.ml.trees.validation import GivenRows, Scoring, given_rows
from ronde.ml.trees.xgboost_json import xgboost_model

__all__ = ["GradientBoosting"]

Array = NDArray[Any]

ROWS_OF_EARLY_STOPPING = 10_000  # of early_stopping="auto", as in scikit-learn
STEPS_OF_CHECKPOINT = 10  # it contains the trees only


@dataclass(frozen=True)
class HeldScoresForm:
    """The form of `validation_score_` in a file: float64, empty if no rows were held out."""

    is_needed: bool = False

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.float64:
            return "is not an array of float64 with one axis"
        if len(value) > sizes.get("steps", 0):
            return f"has {len(value)} steps: expected at most {sizes.get('steps', 0)}"
        return None


class GradientBoosting(TreeEstimator):
    """What the classifier and the regressor have in common.

    Attributes:
        baseline_: The scores before the first tree.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **TreeEstimator._parameter_constraints,
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "min_samples_leaf": [Interval(Integral, 1, None, closed="left")],
        "min_hessian_leaf": [Interval(Real, 0, None, closed="left")],
        "min_gain": [Interval(Real, 0, None, closed="left")],
        "l1_regularization": [Interval(Real, 0, None, closed="left")],
        "l2_regularization": [Interval(Real, 0, None, closed="left")],
        "max_features": [Interval(Real, 0, 1, closed="right")],
        "subsample": [Interval(Real, 0, 1, closed="right")],
        "monotonic_cst": ["array-like", dict, None],
        "interaction_cst": [list, tuple, StrOptions({"pairwise", "no_interactions"}), None],
        "early_stopping": [StrOptions({"auto"}), "boolean"],
        "scoring": [str, callable, None],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither"), None],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **TreeEstimator._fitted_forms,
        "baseline_": ArrayForm(("planes",), ("float64",), is_needed=True),
        "trees_": TreesForm("planes"),
        "train_score_": ArrayForm(("steps",), ("float64",)),
        "validation_score_": HeldScoresForm(),
    }

    loss: Any
    baseline_: Array

    @property
    def n_trees_per_iteration_(self) -> int:
        """How many trees a step adds: one, or one for each of more than two classes."""
        return len(self.baseline_)

    @property
    def is_categorical_(self) -> Array | None:
        """Which columns are categories, a mask; None: none is."""
        check_is_fitted(self)
        mask = self.bins_["is_categorical"] > 0
        return mask if mask.any() else None

    @property
    def feature_importances_(self) -> Array:
        """How much the splits of each column lower the loss, with the sum 1; float64 of shape (features,)."""
        check_is_fitted(self)
        is_split = self.trees_["column"] >= 0
        columns, gains = self.trees_["column"][is_split], self.trees_["gain"][is_split]
        sums = np.bincount(columns, gains, minlength=self.n_features_in_).astype(float)
        return np.asarray(sums / sums.sum() if sums.sum() > 0 else sums)

    def save_xgboost(self, path: str | os.PathLike[str]) -> None:
        """Write the trees as a model of XGBoost, in JSON, which predicts the same up to the precision of float32.

            xgboost.Booster(model_file=path).predict(xgboost.DMatrix(X))

        With columns of categories, `DMatrix` needs `enable_categorical=True` and `feature_types`, or a data frame.

        Args:
            path: The file; its name should end with ".json".

        Raises:
            NotFittedError: `fit` has not been called.
            UsageError: There are categories that are not whole numbers below 2**24.
            OSError: The file cannot be written.
        """
        self._write_foreign(path, xgboost_model)

    def save_lightgbm(self, path: str | os.PathLike[str]) -> None:
        """Write the trees as a model of LightGBM, in text, which predicts the same.

            lightgbm.Booster(model_file=path).predict(X)

        Args:
            path: The file.

        Raises:
            NotFittedError: `fit` has not been called.
            UsageError: There are categories that are not whole numbers below 2**24.
            OSError: The file cannot be written.
        """
        self._write_foreign(path, lightgbm_model)

    def _write_foreign(self, path: str | os.PathLike[str], text_of: Callable[..., str]) -> None:
        check_is_fitted(self)
        names = [str(name) for name in getattr(self, "feature_names_in_", ())] or None
        params = {name: getattr(self, name, None) for name in ("quantile", "power")}
        text = text_of(
            self.trees_,
            Bins(**self.bins_),
            self.baseline_,
            self._name_of_loss,
            params,
            names,
            getattr(self, "categories_", {}),
        )
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    @property
    def _name_of_loss(self) -> str:
        """The name of the loss in xgboost_json and lightgbm_text."""
        if callable(self.loss):
            return "own"
        if self.loss == "log_loss":
            return "logistic" if len(self.baseline_) == 1 else "softmax"
        return str(self.loss)

    def shap_values(self, X: Any) -> Array:
        """Return how much each column adds to the scores of each row: its Shapley value (path-dependent TreeSHAP).

            *_, mean = model.shap_values(X).T  # of two classes, or of a regression

        The scores are what `decision_function` returns; those of the losses "poisson", "gamma" and "tweedie" are the
        logarithms of predictions. For a value that is unknown, a tree counts with both sides of its splits, in
        proportion to their rows in the fit.

        Args:
            X: Shape (rows, features), an array or a data frame.

        Returns:
            float64 of shape (rows, features + 1), of more than two classes (rows, classes, features + 1). The last
            number is the mean score of the fit's rows, and the sum of all is the score of the row.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X has other columns than in `fit`.
        """
        check_is_fitted(self)
        check_in_memory(X, f"shap_values of {type(self).__name__}", READ_IN_PARTS)
        X, bins, scores = self._checked_rows(X), Bins(**self.bins_), len(self.baseline_)
        rows = X.shape[0]
        threads = thread_count(rows * len(self.trees_["column"]))
        contributions = np.zeros((rows, scores, bins.num_columns + 1))
        contributions[:, :, -1] = self.baseline_
        add_shap_values(self.trees_, bins, bins.of(X, threads), contributions, threads)
        return contributions[:, 0] if scores == 1 else contributions

    def _fit(
        self,
        data: TrainingData,
        loss: BoostingLoss,
        categories: dict[str, Array],
        others: Mapping[str, Any],
        given: GivenRows | None = None,
    ) -> Self:
        """Grow the trees.

        `categories`: of data frames; `others`: fitted attributes that are known before; `given`: rows of validation.
        """
        data.require_weight()
        check_row_count(data.num_rows)
        is_warm = self._is_warm
        others = {**others, "seed_": self._seed(), **({"categories_": categories} if categories else {})}
        rules = self._rules(data, loss, categories, given, others)
        state = self._start(loss, data) if is_warm else first_state()
        max_iter = self.max_iter - (self.n_iter_ if is_warm else 0)
        if max_iter < 0:
            raise ValueError(
                f"max_iter={self.max_iter} must be larger than or equal to n_iter_={self.n_iter_} when warm_start==True"
            )
        progress = self._progress(max_iter, data.for_callbacks)
        records = list(self.history_) if is_warm else []
        if max_iter:
            report = BoostingProgress(progress, lambda state: self._attributes(state, others), records)
            place = self._place(data)
            result = iterate(
                BoostingStep(rules, report),
                data=data.rows_at(place),
                state=state,
                max_iter=max_iter,
                on=place,
                rows_per_block=self._rows_per_block(data),
                checkpoint_every=STEPS_OF_CHECKPOINT if can_lose_a_task(place) else None,
            ).state
            self.__dict__.pop("categories_", None)
            for name, value in self._attributes(result, others).items():
                setattr(self, name, value)
            first = len(records)
            for number in range(1, len(result.losses)):
                records.append({"step": first + number, **record_of(result, number)})
        names = dict.fromkeys(
            name for record in records for name in record
        )  # a warm start may have changed them
        records = [{**dict.fromkeys(names, np.nan), **record} for record in records]
        self._end_fit(progress, records)
        return self

    def _given_rows(
        self,
        X: Any,
        y: Any,
        weights: Any,
        categories: dict[str, Array],
        targets_of: Callable[[Array], Array],
    ) -> GivenRows | None:
        """Return the rows of the arguments X_val, y_val and sample_weight_val of `fit`; None: there are none.

        `targets_of`: returns y as float64. Raises ValueError.
        """

        def checked_rows(X: Any) -> Any:
            check_in_memory(X, f"X_val of {type(self).__name__}", READ_IN_PARTS)
            return self._checked_rows(X, categories)

        return given_rows(self, checked_rows, (X, y, weights), targets_of)

    def _do_early_stopping(self, num_rows: int) -> bool:
        return num_rows > ROWS_OF_EARLY_STOPPING if self.early_stopping == "auto" else self.early_stopping

    def _scoring(self, data: TrainingData, others: Mapping[str, Any]) -> Scoring | None:
        """Return what judges the steps in the place of the loss. `others`: as of `_fit`."""
        if isinstance(self.scoring, str) and self.scoring == "loss":
            return None
        if not isinstance(data.rows, Mapping):
            raise ValueError(
                f'scoring={self.scoring!r} needs rows in memory, and X is a source of rows: scoring="loss" does not'
            )
        check_scoring(self, scoring=self.scoring)  # before tasks start
        model = type(self).__new__(type(self))  # a derived class may have other parameters
        known = {name: value for name, value in vars(self).items() if not name.endswith("_")}
        model.__dict__ |= {**known, **others, "n_features_in_": data.num_features, "on": None, "verbose": 0}
        return Scoring(model, self.scoring, partial(attributes_of, others=others))

    def _rules(
        self,
        data: TrainingData,
        loss: BoostingLoss,
        categories: Mapping[str, Array],
        given: GivenRows | None,
        others: Mapping[str, Any],
    ) -> BoostingRules:
        stops = given is not None or self._do_early_stopping(data.num_rows)
        tree = TreeRules(
            max_leaves=self.max_leaf_nodes,
            max_depth=self.max_depth,
            least_rows=self.min_samples_leaf,
            least_hessian=float(self.min_hessian_leaf),
            least_gain=float(self.min_gain),
            l1=float(self.l1_regularization),
            l2=float(self.l2_regularization),
            column_fraction=float(self.max_features),
            monotone=self._monotone(data.num_features),
            interactions=self._interactions(data.num_features),
        )
        if tree.monotone is not None and loss.score_count > 1:
            raise ValueError("monotonic constraints are not supported for multiclass classification.")
        is_categorical = self._is_categorical(data, categories)
        if tree.monotone is not None and (is_categorical & (tree.monotone != 0)).any():
            raise ValueError("Categorical features cannot have monotonic constraints.")
        return BoostingRules(
            loss,
            tree,
            float(self.learning_rate),
            self.max_bins,
            is_categorical,
            held_fraction=self.validation_fraction
            if stops and self.validation_fraction and given is None
            else 0.0,
            patience=self.n_iter_no_change if stops else 0,
            tol=float(self.tol),
            earlier_losses=self._earlier_losses(given is not None) if stops else (),
            row_fraction=float(self.subsample),
            seed=others["seed_"],
            given=given,
            scoring=self._scoring(data, others) if stops else None,
        )

    def _earlier_losses(self, has_given: bool) -> tuple[float, ...]:
        """Return the losses by which a warm start may end, without the last one: it is also the first of this fit.

        `has_given`: whether rows of the validation are given.
        """
        name = "validation_score_" if self.validation_fraction or has_given else "train_score_"
        scores = getattr(self, name, ()) if self._is_warm else ()
        return tuple((-np.asarray(scores, float)[:-1][-self.n_iter_no_change :]).tolist())

    def _monotone(self, columns: int) -> Array | None:
        if self.monotonic_cst is None:
            return None
        signs = np.zeros(columns, np.int8)
        if isinstance(self.monotonic_cst, Mapping):
            for name, sign in self.monotonic_cst.items():
                if sign not in (-1, 0, 1):
                    raise ValueError(f"monotonic_cst[{name!r}] must be either -1, 0 or 1. Got {sign!r}.")
            names = self._numbers_of(list(self.monotonic_cst), "monotonic_cst")
            signs[names] = list(self.monotonic_cst.values())
        else:
            given = np.asarray(self.monotonic_cst)
            if given.shape != (columns,):
                raise ValueError(
                    f"monotonic_cst has shape {given.shape} but the input data X has {columns} features."
                )
            if not np.isin(given, (-1, 0, 1)).all():
                raise ValueError("monotonic_cst must be an array-like of -1, 0 or 1")
            signs[:] = given
        return signs if signs.any() else None

    def _interactions(self, columns: int) -> tuple[Array, Array] | None:
        """Return the groups of columns as of `TreeRules`. Columns that none names are another group."""
        if self.interaction_cst is None:
            return None
        if self.interaction_cst == "no_interactions":
            groups = [[column] for column in range(columns)]
        elif self.interaction_cst == "pairwise":
            groups = [list(pair) for pair in combinations(range(columns), 2)] or [[0]]
        else:
            groups = [self._group(each) for each in self.interaction_cst]
            rest = set(range(columns)).difference(*groups)
            groups += [sorted(rest)] if rest else []
        starts = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        return starts, np.concatenate([np.array(each, np.int32) for each in groups])

    def _group(self, names: Any) -> list[int]:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ValueError(
                f"interaction_cst has {names!r}: expected a list of columns for each group, such as [[0, 1], [2]]"
            )
        return sorted(set(self._numbers_of(list(names), "interaction_cst")))

    def _start(self, loss: BoostingLoss, data: TrainingData) -> dict[str, Any]:
        """Return the state of a warm start. Raises ValueError if the earlier fit had another number of scores."""
        if len(self.baseline_) != loss.score_count or len(self.bins_["is_categorical"]) != data.num_features:
            raise ValueError(
                "cannot start from the earlier fit, which had another number of classes or columns: fit with the same, "
                "or set warm_start=False"
            )
        return first_state(Bins(**self.bins_), self.baseline_, split_trees(self.trees_))

    def _attributes(self, state: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fitted attributes for a state."""
        count, continues = len(state.baseline), self._continues(state)
        losses = {"train_score_": state.losses, "validation_score_": state.held_losses}
        if state.scores:
            scores = {"train_score_": state.scores, "validation_score_": state.held_scores}
            losses = {name: [-score for score in of_steps] for name, of_steps in scores.items()}
        return {
            **others,
            "bins_": state.bins,
            "baseline_": np.asarray(state.baseline, np.float64),
            "trees_": joined_trees(state.trees, count),
            "n_iter_": len(state.trees) // count,
            **{
                name: self._with_earlier_scores(name, of_steps) if continues else -np.array(of_steps)
                for name, of_steps in losses.items()
            },
        }

    def _with_earlier_scores(self, name: str, losses: list[float]) -> Array:
        """Return the scores of the earlier fit, whose last one is also the first of this fit, and those of this fit."""
        earlier = getattr(self, name)
        return np.concatenate([earlier[:-1], -np.array(losses)]) if losses else earlier

    def _continues(self, state: Any) -> bool:
        """Return whether the state has trees of an earlier fit."""
        return len(state.losses) - 1 < len(state.trees) // len(state.baseline) and hasattr(
            self, "train_score_"
        )

    def _scores(self, X: Any) -> Array:
        """Return the sums of all trees, float64 of shape (rows, scores)."""
        *_, scores = self._staged_scores(X, len(self.trees_["scores"]) or 1)
        return scores

    def _staged_scores(self, X: Any, at_once: int) -> Iterator[Array]:
        """Yield the scores after each so many trees. The same array each time."""
        bins, count = Bins(**self.bins_), len(self.trees_["scores"])
        X = self._checked_rows(X)
        threads = thread_count(X.shape[0] * min(at_once, count))
        binned = bins.of(X, threads)
        scores = np.tile(self.baseline_, (X.shape[0], 1))
        if not count:
            yield scores
        for begin in range(0, count, at_once):
            some = some_trees(self.trees_, begin, min(count, begin + at_once))
            add_predictions(some, bins, binned, scores, threads)
            yield scores

    def _checked_scores(self, X: Any) -> Array:
        check_is_fitted(self)
        check_in_memory(X, f"a prediction of {type(self).__name__}", READ_IN_PARTS)
        return self._scores(X)


def attributes_of(model: GradientBoosting, state: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fitted attributes of a model for a state. `others`: as of `GradientBoosting._fit`."""
    return model._attributes(state, others)


class BoostingProgress:
    """Tells the progress of a fit its records, and the attributes of the estimator. Travels to the tasks.

    `earlier`: the records of earlier fits, whose steps come before.
    """

    def __init__(self, progress: Progress, attributes_of: Any, earlier: list[Any]) -> None:
        self._progress, self._attributes_of, self._earlier = progress, attributes_of, earlier

    def __deepcopy__(self, memo: object) -> BoostingProgress:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return BoostingProgress, (self._progress, dict, [])

    def __call__(self, record: Mapping[str, Any], state: Any) -> bool:
        numbered = {**record, "step": record["step"] + len(self._earlier)}
        return self._progress(numbered, lambda: self._attributes_of(state))
