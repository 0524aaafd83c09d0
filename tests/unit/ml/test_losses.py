"""Losses against differences of their values, and far from 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ronde.errors import RemoteError, UsageError
from ronde.ml.losses import (
    HingeLoss,
    LogisticLoss,
    Loss,
    MultinomialLoss,
    PerceptronLoss,
    SquaredHingeLoss,
    SquaredLoss,
)
from ronde.ml.optimizers import LBFGS, LinearObjective

Array = NDArray[Any]
LOSSES = [
    SquaredLoss(),
    LogisticLoss(),
    MultinomialLoss(3),
    HingeLoss(),
    SquaredHingeLoss(),
    PerceptronLoss(),
]
SMOOTH = [loss for loss in LOSSES if not isinstance(loss, HingeLoss | PerceptronLoss)]
TINY = 1e-6


def name_of(loss: object) -> str:
    return type(loss).__name__


def rows_of(loss: Loss) -> tuple[Array, Array]:
    """Return targets and scores."""
    random = np.random.default_rng(3)
    if isinstance(loss, MultinomialLoss):
        return np.array([0, 1, 2, 2, 1]), random.normal(size=(5, 3))
    return np.array([1.0, -1, 1, -1, 1]), random.normal(size=5)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_slopes_are_the_derivatives_of_values(loss: Loss) -> None:
    y, scores = rows_of(loss)
    values, slopes = loss.values_and_slopes(y, scores)
    assert (loss.values(y, scores) == values).all()
    direction = np.random.default_rng(4).normal(size=scores.shape)
    difference = loss.values(y, scores + TINY * direction) - loss.values(y, scores - TINY * direction)
    assert np.allclose(difference / (2 * TINY), (slopes * direction).reshape(5, -1).sum(axis=1), atol=1e-8)


@pytest.mark.parametrize("loss", SMOOTH, ids=name_of)
def test_curvatures_are_the_derivatives_of_slopes(loss: Loss) -> None:
    y, scores = rows_of(loss)
    direction = np.random.default_rng(4).normal(size=scores.shape)
    ends = [loss.values_and_slopes(y, scores + step * direction)[1] for step in (TINY, -TINY)]
    assert np.allclose(
        (ends[0] - ends[1]) / (2 * TINY), loss.curvature_product(y, scores, direction), atol=1e-7
    )


def test_several_outputs_are_squared_and_added() -> None:
    y, scores = np.zeros((2, 3)), np.array([[1.0, 2.0, 2.0], [0.0, 0.0, 4.0]])
    values, slopes = SquaredLoss().values_and_slopes(y, scores)
    assert values.tolist() == [4.5, 8.0]
    assert (slopes == scores).all()


@pytest.mark.parametrize("score", [1e3, 1e8])
def test_large_scores_do_not_overflow(score: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        values, slopes = LogisticLoss().values_and_slopes(np.array([1.0, -1.0]), np.array([score, score]))
        assert (values.tolist(), slopes.tolist()) == ([0.0, score], [0.0, 1.0])
        values, slopes = MultinomialLoss(2).values_and_slopes(
            np.array([0, 1]), np.array([[score, -score]] * 2)
        )
        assert (values.tolist(), slopes.tolist()) == ([0.0, 2 * score], [[0.0, 0.0], [1.0, -1.0]])


def test_small_losses_keep_their_digits() -> None:
    values = LogisticLoss().values(np.ones(1), np.array([50.0]))
    assert values[0] == pytest.approx(np.exp(-50.0), rel=1e-12)


@pytest.mark.parametrize("loss", SMOOTH, ids=name_of)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_the_hessian_of_linear_predictions_gives_the_products_of_the_method(
    loss: Loss, fit_intercept: bool
) -> None:
    random = np.random.default_rng(5)
    y, scores = rows_of(loss)
    block = SimpleNamespace(X=random.normal(size=(5, 2)), y=y, sample_weight=random.random(5))
    objective = LinearObjective(loss, fit_intercept=fit_intercept)
    shape = (*scores.shape[1:], 2 + fit_intercept)
    w, direction = random.normal(size=shape), random.normal(size=shape)
    hessian = objective.hessian(block, w)
    product = objective.hessian_product(block, w, direction)
    assert np.allclose(hessian, hessian.T)
    assert np.allclose(hessian @ direction.ravel(), product.ravel())
    ends = [objective.loss_and_gradient(block, w + step * direction)[1] for step in (TINY, -TINY)]
    assert np.allclose((ends[0] - ends[1]) / (2 * TINY), product, atol=1e-6)


@pytest.mark.parametrize("loss", [LogisticLoss(), HingeLoss(), SquaredHingeLoss(), PerceptronLoss()])
def test_classes_that_are_not_minus_one_and_one_are_an_error(loss: Loss) -> None:
    """With 0 in place of -1 the loss of half of the rows would be constant, and the result silently wrong."""
    loss.check_targets(np.array([-1, 1.0]))
    with pytest.raises(
        UsageError, match=rf"the target 0 is invalid: {type(loss).__name__} expects y to be -1 or 1"
    ):
        loss.check_targets(np.array([1, 0]))


@pytest.mark.parametrize("y", [[0, 3], [-1, 0], [0.5, 1]])
def test_numbers_that_are_no_class_are_an_error(y: list[float]) -> None:
    MultinomialLoss(3).check_targets(np.array([0, 1, 2.0]))
    with pytest.raises(UsageError, match="expects y to be the number of a class, 0 to 2"):
        MultinomialLoss(3).check_targets(np.array(y))


def test_an_optimizer_checks_the_targets_of_all_tasks() -> None:
    rows = {"X": np.ones((100, 1)), "y": np.r_[np.ones(99), 0]}
    with pytest.raises(RemoteError, match=r"the target 0\.0 is invalid"):
        LBFGS().minimize(LinearObjective(LogisticLoss()), rows, np.zeros(2), on="threads:2")


def test_targets_are_numbers() -> None:
    with pytest.raises(UsageError, match="y has the dtype <U3: SquaredLoss expects numbers"):
        SquaredLoss().check_targets(np.array(["yes"]))
