"""`GradientBoostingRanker`: queries over several tasks, NDCG, and what it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn.metrics import ndcg_score

from ronde.ml import GradientBoostingRanker, load, load_lightgbm, load_xgboost

rng = np.random.default_rng(0)
QID = np.repeat(np.arange(40), rng.integers(3, 25, 40))
X = rng.normal(size=(len(QID), 4))
Y = np.clip(np.rint(X[:, 0] + X[:, 1] * X[:, 2] + rng.normal(size=40)[QID]), 0, 4)
# A query on all of four tasks, between two small ones.
LARGE = np.repeat([7, 3, 5], [10, len(QID) - 15, 5])


def bits_of(model: Any) -> list[bytes]:
    arrays = [*model.trees_.values(), model.train_score_, model.validation_score_]
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("qid", [QID, LARGE, QID.astype(str)], ids=["small", "large", "texts"])
def test_tasks_give_the_bits_of_one(qid: Any) -> None:
    rules: dict[str, Any] = {"max_iter": 4, "subsample": 0.8, "early_stopping": True, "random_state": 0}
    one, *others = [
        GradientBoostingRanker(**rules, on=f"threads:{tasks}").fit(X, Y, qid=qid) for tasks in (1, 2, 3, 4)
    ]
    assert (one.validation_score_.size > 0) == (qid is not LARGE)  # of three queries none is held out
    assert [bits_of(each) for each in others] == [bits_of(one)] * 3


def test_the_order_gets_better_and_the_score_is_that_of_scikit_learn() -> None:
    model = GradientBoostingRanker(max_iter=20, early_stopping=False).fit(X, Y, qid=QID)
    scores = model.predict(X)
    of_queries = [
        ndcg_score([2.0 ** Y[rows] - 1], [scores[rows]], k=5) if Y[rows].any() else 1.0
        for rows in (query == QID for query in range(40))
    ]
    assert model.score(X, Y, QID, ndcg_at=5) == pytest.approx(np.mean(of_queries), abs=1e-12)
    assert model.score(X, Y, QID) == pytest.approx(1 + model.train_score_[-1], abs=1e-12)
    assert model.train_score_[-1] > model.train_score_[0] + 0.1


def test_a_weight_counts_as_that_many_queries() -> None:
    weights = rng.integers(0, 3, 40)
    of_rows = np.concatenate([np.tile(np.flatnonzero(query == QID), weights[query]) for query in range(40)])
    numbers = np.concatenate(
        [np.arange(weights[query]).repeat(np.count_nonzero(query == QID)) for query in range(40)]
    )
    rules: dict[str, Any] = {"max_iter": 5, "min_samples_leaf": 1, "max_leaf_nodes": 4}
    weighted = GradientBoostingRanker(**rules).fit(X, Y, QID, weights[QID])
    repeated = GradientBoostingRanker(**rules).fit(X[of_rows], Y[of_rows], 3 * QID[of_rows] + numbers)
    np.testing.assert_allclose(weighted.train_score_, repeated.train_score_, atol=1e-12)
    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X), atol=1e-6)
    score = weighted.score(X, Y, QID, sample_weight=weights[QID])
    assert score == pytest.approx(1 + weighted.train_score_[-1], abs=1e-12)
    rules["on"] = "threads:3"
    several = GradientBoostingRanker(**rules).fit(X, Y, QID, weights[QID])
    assert bits_of(several) == bits_of(weighted)
    with pytest.raises(ValueError, match=r"sample_weight has 1\.0 and 2\.0 in one query"):
        weighted.fit(X, Y, np.zeros(len(Y)), 1 + (np.arange(len(Y)) > 9))


def test_files_of_models(tmp_path: Path) -> None:
    model = GradientBoostingRanker(max_iter=3).fit(X.astype(np.float32), Y, qid=QID)
    model.save(tmp_path / "model")
    model.save_lightgbm(tmp_path / "model.txt")
    model.save_xgboost(tmp_path / "model.json")
    others = [
        load(tmp_path / "model"),
        load_lightgbm(tmp_path / "model.txt"),
        load_xgboost(tmp_path / "model.json"),
    ]
    for other in others:
        assert isinstance(other, GradientBoostingRanker)
        assert np.allclose(
            other.predict(X.astype(np.float32)), model.predict(X.astype(np.float32)), atol=1e-6
        )


@pytest.mark.parametrize(
    ("y", "qid", "message"),
    [
        (Y, None, "qid is None: expected the query of each row"),
        (Y, np.roll(QID, 1), "query 39 of qid has rows in several places: sort the rows"),
        (Y, QID[1:], "inconsistent numbers of samples"),
        (Y, np.where(QID == 3, np.nan, QID), "qid has missing values"),
        (Y, np.array([None] * len(QID)), "qid has missing values"),
        (Y, X, "qid has shape"),
        (None, QID, "requires y to be passed"),
        (Y - 1, QID, "y has -1, which is no relevance: expected whole numbers from 0 to 31"),
        (Y + 0.5, QID, r"y has \d\.5, which is no relevance"),
        (Y + 31, QID, r"y has 3\d, which is no relevance"),
    ],
)
def test_invalid_arguments_are_named(y: Any, qid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientBoostingRanker().fit(X, y, qid=qid)
