"""The search of `engine.tuning`, with the library bayesian-optimization (the extra `tuning`)."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Sequence
from typing import Any

__all__ = ["HINT", "BayesianSearch", "is_installed"]

HINT = "autotune needs the package bayesian-optimization on rank 0: pip install 'ronde[tuning]'"
_GIVEN = 2  # trials before the first proposal
_NOISE = 0.02  # the variance of a measured score, when scores are scaled to variance 1


def is_installed() -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec("bayes_opt") is not None


class BayesianSearch:
    """Proposes points of the unit cube. The same seed and scores lead to the same points."""

    def __init__(self, axes: int, seed: int = 0) -> None:
        from bayes_opt import BayesianOptimization  # takes seconds, and is needed on rank 0 only
        from bayes_opt.acquisition import ExpectedImprovement

        self._names = [f"axis{number}" for number in range(axes)]
        self._optimizer: Any = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self._names, (0.0, 1.0)),
            acquisition_function=ExpectedImprovement(xi=0.01),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(alpha=_NOISE, n_restarts_optimizer=2)
        self._told = 0
        self._random = random.Random(seed)

    def propose(self, known: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
        """Return the point to try next. `known`: all points so far with their scores, in bytes per second.

        The search compares logarithms, because one point may be a hundred times as fast as another. The first
        proposals, as many as there are axes, are random: from very few scores the search would conclude too much.
        """
        if len(known) < _GIVEN + len(self._names):
            return tuple(self._random.random() for _ in self._names)
        for point, score in known[self._told :]:
            self._optimizer.register(dict(zip(self._names, point)), math.log2(max(score, 1.0)))
        self._told = len(known)
        proposed = self._optimizer.suggest()
        return tuple(float(proposed[name]) for name in self._names)
