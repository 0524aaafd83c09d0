"""Records the models of XGBoost and LightGBM that the tests load, with what these libraries predict.

    python tests/unit/ml/trees/record_models.py

It needs both libraries. Rows are float32 numbers; column 1 has missing values, column 3 has categories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "models"
XGBOOST = {
    "reg:squarederror": "gbtree",
    "reg:tweedie": "dart",
    "binary:logistic": "gbtree",
    "multi:softprob": "gbtree",
}
LIGHTGBM = ("regression", "gamma", "binary", "multiclass")


def make_rows() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return 300 rows for a fit, the last 40 of which are recorded, and targets above 0."""
    random = np.random.default_rng(28)
    X = np.round(random.normal(size=(300, 4)), 3).astype(np.float32).astype(np.float64)
    X[::5, 1] = np.nan
    X[:, 3] = random.integers(0, 9, 300)
    X[::11, 3] = np.nan
    y = np.exp(X[:, 0] + np.nan_to_num(X[:, 1]) ** 2 / 2 + np.isin(X[:, 3], [1, 4, 7]) - 1)
    return X, np.round(y, 3)


def classes_of(y: NDArray[Any], count: int) -> NDArray[Any]:
    """Return classes of targets."""
    return np.asarray(np.digitize(y, [0.8, 2.0][: count - 1]))


def record(name: str, predictions: Any, contributions: Any) -> None:
    """Write what a library predicts for the last 40 rows; missing and unknown categories are among them."""
    content = {"predictions": np.asarray(predictions, float).round(9).tolist()}
    content["contributions"] = np.asarray(contributions, float).round(9).tolist()
    (FOLDER / f"{name}.expected.json").write_text(json.dumps(content) + "\n")


def recorded_rows(X: NDArray[Any]) -> NDArray[Any]:
    """Return the rows whose predictions are recorded."""
    rows = X[-40:].copy()
    rows[:5, 3], rows[5:8, 0] = 77, np.nan
    return rows


def main() -> None:
    import lightgbm
    import xgboost

    X, y = make_rows()
    rows, kinds = recorded_rows(X), ["float", "float", "float", "c"]
    for objective, booster in XGBOOST.items():
        classes = {"binary:logistic": 2, "multi:softprob": 3}.get(objective)
        params: dict[str, Any] = {"objective": objective, "booster": booster, "max_depth": 3, "nthread": 1}
        params |= {"num_class": 3} if classes == 3 else {}
        params |= {"rate_drop": 0.5} if booster == "dart" else {}
        targets = classes_of(y, classes) if classes else y
        data = xgboost.DMatrix(X, targets, enable_categorical=True, feature_types=kinds)
        model = xgboost.train(params, data, 4)
        name = "xgboost-" + objective.replace(":", "-")
        model.save_model(FOLDER / f"{name}.json")
        asked = xgboost.DMatrix(rows, enable_categorical=True, feature_types=kinds)
        record(name, model.predict(asked), model.predict(asked, pred_contribs=True))
    for objective in LIGHTGBM:
        classes = {"binary": 2, "multiclass": 3}.get(objective)
        params = {"objective": objective, "num_leaves": 5, "num_threads": 1, "verbose": -1}
        params |= {"num_class": 3} if classes == 3 else {}
        params |= {"min_data_per_group": 5, "cat_smooth": 1}
        targets = classes_of(y, classes) if classes else y
        trained = lightgbm.train(params, lightgbm.Dataset(X, targets, categorical_feature=[3]), 4)
        text = trained.model_to_string().split("\nparameters:")[0] + "\n\npandas_categorical:null\n"
        (FOLDER / f"lightgbm-{objective}.txt").write_text(text)
        record(f"lightgbm-{objective}", trained.predict(rows), trained.predict(rows, pred_contrib=True))


if __name__ == "__main__":
    main()
