"""Estimators of trees with sparse rows: the bits of the same rows as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import csc_array, csr_matrix, random_array

from ronde.ml import ExtraTreesRegressor, GradientBoostingClassifier, RandomForestClassifier
from ronde.ml.trees import bins

SPARSE = random_array((500, 20), density=0.2, rng=np.random.default_rng(0), format="csr")
SPARSE.data = np.round(20 * SPARSE.data)
SPARSE.data[::7] = np.nan
DENSE = SPARSE.toarray()
CLASSES = (np.nan_to_num(DENSE[:, :3]).sum(axis=1) > 5).astype(int)
WEIGHTS = np.random.default_rng(1).random(500)


def pair(kind: Any, tasks: int, form: Any, weights: Any) -> tuple[Any, Any]:
    params = {"max_iter": 3} if kind is GradientBoostingClassifier else {"n_estimators": 3}
    models = [
        kind(categorical_features=[4], on=f"threads:{tasks}", **params).fit(rows, CLASSES, weights)
        for rows in (DENSE, form(SPARSE))
    ]
    return models[0], models[1]


@pytest.mark.parametrize("kind", [GradientBoostingClassifier, RandomForestClassifier, ExtraTreesRegressor])
@pytest.mark.parametrize(("tasks", "form", "weights"), [(1, csr_matrix, None), (3, csc_array, WEIGHTS)])
def test_sparse_rows_give_the_same_bits(
    kind: Any, tasks: int, form: Any, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bins, "NUMBERS_AT_ONCE", 700)  # in several parts
    dense, sparse = pair(kind, tasks, form, weights)
    for name in dense.trees_:
        assert dense.trees_[name].tobytes() == sparse.trees_[name].tobytes()
    assert list(sparse.history_) == list(dense.history_)
    assert sparse.predict(form(SPARSE)).tobytes() == dense.predict(DENSE).tobytes()
    if kind is GradientBoostingClassifier:
        assert sparse.shap_values(SPARSE[:9]).tobytes() == dense.shap_values(DENSE[:9]).tobytes()
