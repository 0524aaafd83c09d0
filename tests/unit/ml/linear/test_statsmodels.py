"""Coefficients next to those of statsmodels 0.15.0: `python -m tests.unit.ml.linear.statsmodels_oracle` prints them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.ml.linear.statsmodels_oracle import BINARY, CLASSES, NUMBERS, RIDGE, WEIGHTS, X

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.ml import LinearRegression, LogisticRegression, Ridge
from ronde.ml.losses import LogisticLoss, MultinomialLoss
from ronde.ml.optimizers import LinearObjective, Newton

OLS = [1.082605302064, -1.569447743155, 0.60435598523, 0.613544779986]
WLS = [1.083822539759, -1.514407386411, 0.56509584391, 0.566050681973]
RIDGED = [0.932246599365, -0.667344465411, 0.501892111028, 0.022613894981]
LOGIT = [0.54241542656, -0.711108595465, -0.887613235591, 0.385435442591]
WEIGHTED_LOGIT = [0.511947092126, -0.944822823729, -0.849747439879, 0.449387124882]
MNLOGIT = [  # of the classes 1 and 2, minus those of class 0
    [0.153477041681, 0.564194017807, 0.587687455039, -0.474810158329],
    [-0.256152340911, 1.908173609588, -0.065011649474, -2.037480751765],
]
WITHOUT_PENALTY: dict[str, Any] = {"C": np.inf, "tol": 1e-9, "max_iter": 1000}


@pytest.mark.parametrize(
    ("model", "y", "weights", "expected"),
    [
        (LinearRegression(), NUMBERS, None, OLS),
        (LinearRegression(), NUMBERS, WEIGHTS, WLS),
        (Ridge(RIDGE * len(X)), NUMBERS, None, RIDGED),
        (LogisticRegression(**WITHOUT_PENALTY), BINARY, None, LOGIT),
        (LogisticRegression(**WITHOUT_PENALTY), BINARY, WEIGHTS, WEIGHTED_LOGIT),
        (LogisticRegression(**WITHOUT_PENALTY), CLASSES, None, MNLOGIT),
    ],
    ids=["least squares", "weighted", "ridge", "logistic", "weighted logistic", "multinomial"],
)
def test_estimators(model: Any, y: Any, weights: Any, expected: Any) -> None:
    model.fit(X, y, weights)
    found = np.column_stack([np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)])
    if len(found) == 3:
        found = found[1:] - found[0]
    np.testing.assert_allclose(found, np.atleast_2d(expected), rtol=0, atol=1e-6)


def test_newton() -> None:
    newton = Newton(tol=1e-10)
    signs = {"X": X, "y": np.where(BINARY, 1.0, -1.0)}
    w = newton.minimize(LinearObjective(LogisticLoss()), signs, np.zeros(4), on="threads:1").w
    np.testing.assert_allclose(w, LOGIT, rtol=0, atol=1e-6)
    classes = {"X": X, "y": CLASSES}
    w = newton.minimize(LinearObjective(MultinomialLoss(3)), classes, np.zeros((3, 4)), on="threads:1").w
    np.testing.assert_allclose(w[1:] - w[0], MNLOGIT, rtol=0, atol=1e-6)
