"""Parameters of scikit-learn's estimators that those of `ronde.ml` do not have, and what to do instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["advice_for", "explains_missing_parameters", "missing_parameter_text"]

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
ADVICE_OF = {
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


def advice_for(estimator: str, parameter: str) -> str | None:
    """Return what to do about a parameter that only scikit-learn's estimator has; None for an unknown one."""
    return ADVICE_OF.get(estimator, {}).get(parameter) or ADVICE.get(parameter)


def missing_parameter_text(estimator: str, parameter: str, advice: str) -> str:
    """Return the text of the error for such a parameter."""
    return f"{estimator} has no parameter {parameter!r}, unlike scikit-learn's: {advice}"


def explains_missing_parameters(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate `__init__` of an estimator: the error for a parameter of scikit-learn says what to do instead."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(estimator: Any, *arguments: Any, **params: Any) -> None:
        name = type(estimator).__name__
        for param in params:
            if param not in known and (advice := advice_for(name, param)):
                raise TypeError(missing_parameter_text(name, param, advice))
        init(estimator, *arguments, **params)

    return checked
