"""`ronde.ml.optimizers`: minimize a function that is a sum over rows, in several tasks.

    from ronde.ml.losses import LogisticLoss
    from ronde.ml.optimizers import LBFGS, LinearObjective

    objective = LinearObjective(LogisticLoss(), l2=1e-4)
    result = LBFGS(tol=1e-8).minimize(objective, {"X": X, "y": y}, start=np.zeros(101), on="local:2")
    result.w, result.loss, result.converged

docs/optimizers.md explains them, and how to write an objective. They need NumPy only.
"""

from __future__ import annotations

from ronde.ml.optimizers.descent import LBFGS, OWLQN, GradientDescent, Newton
from ronde.ml.optimizers.objective import LinearObjective, Objective
from ronde.ml.optimizers.optimizer import Optimizer, OptimizerResult
from ronde.ml.optimizers.sgd import SGD

__all__ = [
    "LBFGS",
    "OWLQN",
    "SGD",
    "GradientDescent",
    "LinearObjective",
    "Newton",
    "Objective",
    "Optimizer",
    "OptimizerResult",
]
