"""What all estimators share: parameters, the course of a fit, saving."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from sklearn.base import BaseEstimator
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.utils._param_validation import HasMethods  # private, but what `_validate_params` reads

from ronde.ml.fitted_forms import ArrayForm, FittedForm, KindForm, NumberForm
from ronde.ml.history import History, Progress
from ronde.ml.saving import save
from ronde.ml.tasks import one_blas_thread

__all__ = ["DistributedEstimator", "fitting", "overflow_message", "vanishing_message"]

Method = TypeVar("Method", bound=Callable[..., Any])
ONE_METHOD = "the estimator has one method, docs/estimators.md names it: leave it out"
USE_ON = '`on` says where the tasks run, for example on="local:2"'
NO_PENALTY = "the perceptron has no penalties: leave it out, or use LinearSVC"
NO_HOLDOUT = "no rows are held out: `n_iter_no_change` and `max_iter` end the fit"
X_STAYS = "X is never changed: leave it out"
ADVICE = {
    "copy_X": X_STAYS,
    "copy_x": X_STAYS,
    "dual": ONE_METHOD,
    "intercept_scaling": "intercepts are never penalized: leave it out",
    "multi_class": "each class is fitted against the rest: leave it out",
    "n_jobs": USE_ON,
    "positive": "coefficients may have both signs: use scikit-learn's estimator for positive ones",
    "precompute": ONE_METHOD,
    "selection": ONE_METHOD,
}
BOOSTING = {
    "n_estimators": "the number of steps is `max_iter`",
}
FOREST = {
    "ccp_alpha": "trees are not pruned: limit them by `min_samples_leaf`, `max_leaf_nodes` or `max_depth`",
    "monotonic_cst": "splits have no such constraints: use GradientBoostingClassifier or GradientBoostingRegressor",
}
FORESTS = ("ExtraTreesClassifier", "ExtraTreesRegressor", "RandomForestClassifier", "RandomForestRegressor")
ADVICE_OF = {
    **dict.fromkeys(FORESTS, FOREST),
    "LatentDirichletAllocation": {
        "evaluate_every": "`history_` has the loss of each step: leave it out",
        "perp_tol": "a fit takes `max_iter` steps, unless a callback ends it: leave it out",
    },
    "GradientBoostingClassifier": BOOSTING,
    "GradientBoostingRanker": {**BOOSTING, "group": "rows of a query are named by `qid` in `fit`"},
    "GradientBoostingRegressor": BOOSTING,
    "LinearSVC": {"loss": "the loss is the squared hinge: leave it out"},
    "LogisticRegression": {
        "penalty": 'l1_ratio=1.0 stands for "l1", l1_ratio=0.0 for "l2", C=float("inf") for None'
    },
    "Perceptron": {
        "alpha": NO_PENALTY,
        "early_stopping": NO_HOLDOUT,
        "eta0": "all weights start at 0, so a rate would only scale them: leave it out",
        "l1_ratio": NO_PENALTY,
        "penalty": NO_PENALTY,
        "shuffle": "the order of rows has no effect: leave it out",
        "tol": "the fit ends after `n_iter_no_change` steps without fewer mistakes: leave it out",
        "validation_fraction": NO_HOLDOUT,
    },
}


def fitting(method: Method) -> Method:
    """Decorate `fit` and `partial_fit`: check the parameters, limit BLAS to one thread, end the callbacks.

    While other estimators of scikit-learn do the same by a private decorator, this one uses public parts.
    """

    @functools.wraps(method)
    def checked(estimator: Any, *arguments: Any, **named: Any) -> Any:
        estimator._validate_params()
        with one_blas_thread():
            return method(estimator, *arguments, **named)

    decorated: Method = with_callbacks(checked)
    return decorated


def overflow_message(name: str, loss: float, step: float) -> str:
    """Return the text of the error for a loss that is not finite, although X and y are. `name`: of the estimator."""
    return (
        f"{name}: the loss is {loss} in step {step:.0f}, because numbers in X or y are so large that sums of their "
        "squares overflow: divide them by their scale, for example with scikit-learn's StandardScaler"
    )


def vanishing_message(name: str) -> str:
    """Return the text of the error for numbers whose squares are 0 within the range of numbers. `name`: as above."""
    return (
        f"{name}: numbers in X or y are so small that their squares vanish: divide them by their scale, for example "
        "with scikit-learn's StandardScaler"
    )


class DistributedEstimator(CallbackSupportMixin, BaseEstimator):
    """The base of the estimators of `ronde.ml`.

    A derived class has the parameters `on` and `verbose`, adds the constraints of others to `_parameter_constraints`,
    which scikit-learn checks, adds its fitted attributes to `_fitted_forms`, and decorates `fit` with `fitting`.

    Attributes:
        history_: A `History`: one record for each step of the last fit.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "on": [None, str, HasMethods(["capacity", "request", "cancel"])],  # a name or a cluster
        "verbose": ["verbose"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        "n_features_in_": NumberForm(size="features", is_needed=True),
        "feature_names_in_": ArrayForm(("features",), ("str",)),
        "history_": KindForm(History, "a History"),
        "n_iter_": NumberForm(),
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            type.__setattr__(cls, "__init__", explains_missing_parameters(cls.__init__))

    def set_params(self, **params: Any) -> Self:
        """Set parameters; return the estimator.

        Args:
            params: The parameters by name.

        Raises:
            ValueError: The estimator has no such parameter. For one that scikit-learn's has, the error says what to do.
        """
        for param in params.keys() - self._get_param_names():
            if problem := describe_missing(type(self).__name__, param):
                raise ValueError(problem)
        estimator: Self = super().set_params(**params)
        return estimator

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and fitted attributes to a file, which `ronde.ml.load` reads. It is not a pickle.

        The settings of `set_output` and `set_fit_request` are saved, the parameter `on` and callbacks are not.

        Args:
            path: The file. One that exists is replaced when the new one is complete.

        Raises:
            UsageError: A value has no plain form, for example a `random_state` that is no number.
            OSError: The file cannot be written.
        """
        save(self, path)

    def _progress(self, max_steps: int | None, data: Mapping[str, Any]) -> Progress:
        """Return what the step calls on task 0 after each step. `data`: X, y and metadata, for callbacks.

        Raises whatever a callback raises.
        """
        context = None
        if hasattr(self, "_skl_callbacks") or hasattr(self, "_parent_callback_ctx"):
            context = self._init_callback_context(max_subtasks=max_steps)
            context.call_on_fit_task_begin(estimator=self, **data)
        return Progress(type(self).__name__, bool(self.verbose), context, self, data)

    def _end_fit(self, progress: Progress, records: Iterable[Mapping[str, Any]]) -> None:
        """Set `history_`, and tell the callbacks that the estimator is fitted.

        Raises ValueError if a loss is infinite or NaN, and whatever a callback raises.
        """
        self.history_ = History(records)
        for record in self.history_:
            if not math.isfinite(record["loss"]):
                raise ValueError(overflow_message(type(self).__name__, record["loss"], record["step"]))
        progress.end()


def describe_missing(estimator: str, parameter: str) -> str | None:
    """Return the error for a parameter that only scikit-learn's estimator has, with advice; None for an unknown one."""
    advice = ADVICE_OF.get(estimator, {}).get(parameter) or ADVICE.get(parameter)
    return advice and f"{estimator} has no parameter {parameter!r}, unlike scikit-learn's: {advice}"


def explains_missing_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate `__init__` of an estimator: the error for a parameter of scikit-learn says what to do instead."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(estimator: Any, *arguments: Any, **params: Any) -> None:
        for param in params:
            if param not in known and (problem := describe_missing(type(estimator).__name__, param)):
                raise TypeError(problem)
        init(estimator, *arguments, **params)

    return checked
