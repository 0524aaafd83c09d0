"""Prints the coefficients that statsmodels finds, which `test_statsmodels.py` has as numbers.

python -m tests.unit.ml.linear.statsmodels_oracle
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import numpy as np

__all__ = ["BINARY", "CLASSES", "NUMBERS", "RIDGE", "WEIGHTS", "X"]

ROW = np.arange(40)
X = np.column_stack([ROW % 5 - 2.0, ROW * ROW % 7 / 3, np.sin(ROW)])
WEIGHTS = 1.0 + ROW % 3
NUMBERS = X @ [1.0, -2.0, 0.5] + ROW * 3 % 10 / 5
BINARY = (ROW * 7 % 11 + X[:, 0] > 5).astype(int)
CLASSES = np.clip((ROW * 5 % 9 + X[:, 1] * 2) // 4, 0, 2).astype(int)
RIDGE = 0.3  # for the mean of half squares


def main() -> None:
    sm = importlib.import_module("statsmodels.api")
    version = importlib.metadata.version("statsmodels")

    def show(name: str, params: Any) -> None:
        print(f"{name} = {np.asarray(params).T.round(12).tolist()}")

    rows = sm.add_constant(X, prepend=False)
    print("statsmodels", version)
    show("OLS", sm.OLS(NUMBERS, rows).fit().params)
    show("WLS", sm.WLS(NUMBERS, rows, WEIGHTS).fit().params)
    penalties = RIDGE * np.array([1, 1, 1, 0])
    show("RIDGE", sm.OLS(NUMBERS, rows).fit_regularized(alpha=penalties, L1_wt=0.0).params)
    show("LOGIT", sm.Logit(BINARY, rows).fit(method="newton", tol=1e-14, disp=False).params)
    binomial = sm.GLM(BINARY, rows, family=sm.families.Binomial(), freq_weights=WEIGHTS)
    show("WEIGHTED_LOGIT", binomial.fit(tol=1e-14).params)
    show("MNLOGIT", sm.MNLogit(CLASSES, rows).fit(method="newton", tol=1e-14, maxiter=100, disp=False).params)


if __name__ == "__main__":
    main()
