"""What ends a fit of boosting early: rows given in `fit`, and scorers of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn.metrics import log_loss

from ronde.errors import RemoteError
from ronde.ml import GradientBoostingClassifier, GradientBoostingRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 4))
Y = X[:, 0] * X[:, 1] + 0.5 * rng.normal(size=600)
NAMES = np.where(Y > 0, "yes", "no")
GIVEN = {"X_val": X[400:], "y_val": NAMES[400:]}


def classifier(tasks: int = 1, **params: Any) -> Any:
    return GradientBoostingClassifier(
        **{"max_iter": 40, "early_stopping": True, "n_iter_no_change": 4, "on": f"threads:{tasks}", **params}
    )


@pytest.mark.parametrize("scoring", ["loss", "accuracy", None])
def test_the_fit_ends_by_the_rows_that_are_given(scoring: Any) -> None:
    weights = rng.random(200)
    models = [
        classifier(tasks, scoring=scoring).fit(X[:400], NAMES[:400], **GIVEN, sample_weight_val=weights)
        for tasks in (1, 3)
    ]
    scores = [
        -log_loss(GIVEN["y_val"], probabilities, sample_weight=weights)
        if scoring == "loss"
        else np.average(model_classes == GIVEN["y_val"], weights=weights)
        for probabilities, model_classes in zip(
            models[0].staged_predict_proba(X[400:]), models[0].staged_predict(X[400:])
        )
    ]
    np.testing.assert_allclose(models[0].validation_score_[1:], scores)
    assert models[0].n_iter_ < 40
    assert max(scores[-4:]) <= scores[-5]
    for name in ("train_score_", "validation_score_"):
        assert getattr(models[0], name).tobytes() == getattr(models[1], name).tobytes()


@pytest.mark.parametrize("loss", ["huber", "absolute_error", "poisson"])
def test_losses_of_given_rows(loss: str) -> None:
    y = np.exp(Y)
    model = GradientBoostingRegressor(loss, max_iter=5)
    model.fit(X[:400], y[:400], X_val=X[:400], y_val=y[:400])
    np.testing.assert_allclose(model.validation_score_, model.train_score_)


@pytest.mark.parametrize("held", [0.3, None])
def test_a_scorer_gets_classes_and_may_predict_other_rows(held: float | None) -> None:
    calls: list[tuple[Any, ...]] = []

    def own(model: Any, rows: Any, y: Any) -> float:
        calls.append((len(rows), len(y), set(y), model.predict(X[:9]).tolist()))
        return float((model.predict(rows) == y).mean())

    model = classifier(3, scoring=own, max_iter=3, validation_fraction=held).fit(X, NAMES)
    assert len(calls) == (8 if held else 4)
    assert calls[-1][2:] == ({"yes", "no"}, model.predict(X[:9]).tolist())
    assert calls[-1][0] == calls[-1][1] == (600 if held is None else 600 - calls[-2][0])
    assert {"score", "loss"} <= model.history_[-1].keys()


def test_a_scorer_gets_each_class_however_rare() -> None:
    y = np.where(np.arange(600) % 200 == 7, "rare", NAMES)
    for seed in range(3):
        models = [
            classifier(tasks, scoring="neg_log_loss", max_iter=2, random_state=seed).fit(X, y)
            for tasks in (1, 3)
        ]
        assert models[0].validation_score_.tobytes() == models[1].validation_score_.tobytes()


class Short(GradientBoostingClassifier):
    """A derived class with other parameters."""

    def __init__(self, max_iter: int = 3) -> None:
        super().__init__(max_iter=max_iter, scoring="accuracy", early_stopping=True)


def test_a_scorer_in_a_derived_class() -> None:
    assert len(Short().fit(X, NAMES).validation_score_) == 4


def test_a_warm_start_goes_on_with_its_scores() -> None:
    params: dict[str, Any] = {"warm_start": True, "early_stopping": True, "scoring": "r2", "random_state": 3}
    whole = GradientBoostingRegressor(max_iter=12, **params).fit(X, Y)
    parts = GradientBoostingRegressor(max_iter=5, **params).fit(X, Y)
    parts.set_params(max_iter=12).fit(X, Y)
    assert parts.validation_score_.tobytes() == whole.validation_score_.tobytes()
    assert [record["score"] for record in parts.history_] == [record["score"] for record in whole.history_]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"X_val": X}, "y_val was not provided"),
        ({"y_val": NAMES}, "X_val was not provided"),
        ({"sample_weight_val": np.ones(600)}, "X_val and y_val were not provided"),
        ({**GIVEN, "X_val": X}, "inconsistent numbers"),
        ({**GIVEN, "X_val": X[400:, :2]}, "expecting 4 features"),
        ({**GIVEN, "y_val": ["may", *NAMES[401:]]}, r"y_val has the classes \['may'\]"),
        ({**GIVEN, "sample_weight_val": np.zeros(200)}, "at least one non-zero number"),
        ({**GIVEN, "X_val": "rows.parquet"}, "needs rows in memory"),
    ],
)
def test_wrong_rows(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier().fit(X, NAMES, **given)


def test_wrong_scorers() -> None:
    with pytest.raises(ValueError, match="early_stopping is False"):
        classifier(early_stopping=False).fit(X, NAMES, **GIVEN)
    with pytest.raises(ValueError, match="must be a str among"):
        classifier(scoring="accurate").fit(X, NAMES)
    with pytest.raises(RemoteError, match="pos_label=1 is not a valid label"):
        classifier(scoring="f1").fit(X, NAMES)
