"""The optimizers on linear objectives, against optima that another method or library has found."""

from __future__ import annotations

import itertools
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
from ronde.ml.optimizers import LBFGS, OWLQN, SGD, GradientDescent, LinearObjective, Newton, Objective
from ronde.ml.optimizers.optimizer import Optimizer

Array = NDArray[Any]

ROWS, FEATURES = 60, 4
ONE = "threads:1"
SMOOTH = [
    pytest.param(LBFGS(500, 1e-9), id="L-BFGS"),
    pytest.param(OWLQN(500, 1e-9), id="OWL-QN"),
    pytest.param(Newton(50, 1e-9), id="Newton"),
    pytest.param(Newton(50, 1e-9, dense_size=0), id="Newton-CG"),
]


def rows_of(loss: Loss) -> dict[str, Array]:
    """Return data for a loss: X, noisy y and weights, some of which are 0."""
    random = np.random.default_rng(7)
    X = random.normal(size=(ROWS, FEATURES)) * [0.3, 1, 1, 3]
    scores = X @ [1.0, -0.5, 0.0, 0.2] + 0.3 + random.normal(size=ROWS)
    y = scores if isinstance(loss, SquaredLoss) else np.where(scores > 0, 1.0, -1.0)
    if isinstance(loss, MultinomialLoss):
        y = np.digitize(scores, [-0.5, 0.5]).astype(float)
    return {"X": X, "y": y, "sample_weight": random.integers(0, 3, ROWS).astype(float)}


def start_for(loss: Loss) -> Array:
    return np.zeros((3, FEATURES + 1) if isinstance(loss, MultinomialLoss) else FEATURES + 1)


def full_objective(objective: LinearObjective, data: dict[str, Array], w: Array) -> tuple[float, Array]:
    """Return value and gradient of what the optimizers minimize, from the formula in the docstring of Objective."""
    block = SimpleNamespace(**data)
    loss, gradient = objective.loss_and_gradient(block, w)
    weight, mask = data["sample_weight"].sum(), objective.penalty_factors(w)
    return loss / weight + objective.l2 * np.sum(mask * w**2), gradient / weight + 2 * objective.l2 * mask * w


@pytest.mark.parametrize("optimizer", SMOOTH)
@pytest.mark.parametrize(
    "loss",
    [SquaredLoss(), LogisticLoss(), MultinomialLoss(3), SquaredHingeLoss()],
    ids=lambda x: type(x).__name__,
)
def test_converges_to_the_optimum_that_scipy_finds(loss: Loss, optimizer: Optimizer) -> None:
    scipy_optimize = pytest.importorskip("scipy.optimize")
    objective, data, start = LinearObjective(loss, l2=0.01), rows_of(loss), start_for(loss)

    def flat(w: Array) -> tuple[float, Array]:
        value, gradient = full_objective(objective, data, w.reshape(start.shape))
        return value, gradient.ravel()

    options = {"gtol": 1e-10, "ftol": 1e-16, "maxiter": 5000}
    best = scipy_optimize.minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    result = optimizer.minimize(objective, data, start, on=ONE)
    assert result.converged
    assert result.loss == pytest.approx(best.fun, abs=1e-12)
    assert np.allclose(result.w.ravel(), best.x, rtol=0, atol=1e-6)
    assert result.n_iter == len(result.history) == result.history[-1]["step"]
    losses = [record["loss"] for record in result.history]
    assert all(after <= before * (1 + 1e-14) for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("l1", [0.01, 0.05, 0.2])
def test_owlqn_finds_the_weights_and_the_zeros_of_coordinate_descent(l1: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    data = rows_of(SquaredLoss())
    objective = LinearObjective(SquaredLoss(), l1=l1, l2=0.01)
    result = OWLQN(500, 1e-9).minimize(objective, data, np.zeros(FEATURES + 1), on=ONE)
    alpha = l1 + 2 * objective.l2
    oracle = linear_model.ElasticNet(alpha=alpha, l1_ratio=l1 / alpha, tol=1e-14, max_iter=100_000)
    oracle.fit(data["X"], data["y"], sample_weight=data["sample_weight"])
    assert result.converged
    assert np.allclose(result.w, [*oracle.coef_, oracle.intercept_], rtol=0, atol=1e-6)
    assert ((result.w[:-1] == 0) == (oracle.coef_ == 0)).all()


def test_estimates_are_those_of_statsmodels() -> None:
    # Its 0.15.0 gave the numbers: GLM with Binomial and freq_weights, WLS, GLM with Poisson, MNLogit.
    i = np.arange(40)
    X = np.column_stack([i % 5 - 2.0, i * i % 7 / 3, np.sin(i)])
    weights = 1.0 + i % 3
    binary = np.where(i * 7 % 11 + X[:, 0] > 5, 1.0, -1.0)
    classes = np.clip((i * 5 % 9 + X[:, 1] * 2) // 4, 0, 2)
    numbers = X @ [1.0, -2.0, 0.5] + i * 3 % 10 / 5
    counts = i * 13 % 6
    newton = Newton(tol=1e-10)

    def found(objective: Objective, start: Array, **data: Array) -> Array:
        return newton.minimize(objective, data, start, on=ONE).w

    w = found(LinearObjective(LogisticLoss()), np.zeros(4), X=X, y=binary, sample_weight=weights)
    assert np.allclose(
        w, [0.511947092126, -0.944822823729, -0.849747439879, 0.449387124882], rtol=0, atol=1e-8
    )
    w = found(LinearObjective(SquaredLoss()), np.zeros(4), X=X, y=numbers, sample_weight=weights)
    assert np.allclose(w, [1.083822539759, -1.514407386411, 0.56509584391, 0.566050681973], rtol=0, atol=1e-8)
    w = found(LinearObjective(MultinomialLoss(3)), np.zeros((3, 4)), X=X, y=classes)
    first = [0.153477041681, 0.564194017807, 0.587687455039, -0.474810158329]
    second = [-0.256152340911, 1.908173609588, -0.065011649474, -2.037480751765]
    assert np.allclose(w[1:] - w[0], [first, second], rtol=0, atol=1e-8)
    w = LBFGS(tol=1e-10).minimize(Poisson(), {"X": np.c_[X, np.ones(40)], "y": counts}, np.zeros(4), on=ONE).w
    assert np.allclose(
        w, [0.050659619109, -0.058080220129, -0.102495632791, 0.912549636901], rtol=0, atol=1e-8
    )


def test_gradient_descent_converges_too() -> None:
    data, objective = rows_of(LogisticLoss()), LinearObjective(LogisticLoss(), l1=0.02, l2=0.1)
    best = OWLQN(tol=1e-9).minimize(objective, data, np.zeros(5), on=ONE)
    result = GradientDescent(tol=1e-8).minimize(objective, data, np.zeros(5), on=ONE)
    assert result.reason == "gradient"
    assert np.allclose(result.w, best.w, rtol=0, atol=1e-6)
    assert ((result.w == 0) == (best.w == 0)).all()


def test_owlqn_with_a_penalty_above_all_slopes_leaves_only_the_intercept() -> None:
    data = rows_of(SquaredLoss())
    objective = LinearObjective(SquaredLoss(), l1=100.0)
    result = OWLQN(tol=1e-9).minimize(objective, data, np.ones(FEATURES + 1), on=ONE)
    mean = np.average(data["y"], weights=data["sample_weight"])
    assert np.allclose(result.w, [0, 0, 0, 0, mean], rtol=0, atol=1e-8)
    assert (result.w[:-1] == 0).all()


@pytest.mark.parametrize(
    "optimizer",
    [
        OWLQN(20),
        Newton(20),
        Newton(20, dense_size=0),
        GradientDescent(20),
        SGD(3, momentum=0.5, average=True),
    ],
    ids=lambda x: type(x).__name__,
)
def test_any_number_of_tasks_gives_the_same_bits(optimizer: Optimizer) -> None:
    objective = LinearObjective(LogisticLoss(), l2=1e-3)
    found = [
        optimizer.minimize(objective, rows_of(LogisticLoss()), np.zeros(FEATURES + 1), on=f"threads:{tasks}")
        for tasks in (1, 2, 3, 4)
    ]
    assert all((each.w == found[0].w).all() for each in found)
    assert all(each.history == found[0].history for each in found)


def test_sparse_rows_give_the_weights_of_dense_ones() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    for loss, optimizer in [(SquaredHingeLoss(), LBFGS(tol=1e-6)), (MultinomialLoss(3), Newton(tol=1e-9))]:
        objective, data = LinearObjective(loss, l2=0.01), rows_of(loss)
        dense = optimizer.minimize(objective, data, start_for(loss), on=ONE)
        data["X"] = sparse.csr_array(data["X"])
        assert np.allclose(optimizer.minimize(objective, data, start_for(loss), on=ONE).w, dense.w, atol=1e-6)


def test_float32_rows_are_not_converted() -> None:
    data = rows_of(LogisticLoss())
    objective = LinearObjective(LogisticLoss(), l2=0.01)
    exact = LBFGS().minimize(objective, data, np.zeros(FEATURES + 1), on=ONE)
    rounded = LBFGS(tol=1e-5).minimize(
        objective, data | {"X": data["X"].astype(np.float32)}, np.zeros(FEATURES + 1), on=ONE
    )
    assert np.allclose(rounded.w, exact.w, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
@pytest.mark.parametrize("optimizer", [*SMOOTH, pytest.param(SGD(20, seed=1), id="SGD")])
def test_rows_of_integers_give_the_weights_of_floats(optimizer: Optimizer, dtype: Any) -> None:
    random = np.random.default_rng(0)
    X = random.integers(0, 2, size=(ROWS, FEATURES)).astype(dtype)
    y = np.where(X @ np.array([3.0, -2.0, 0.0, 1.0]) + random.normal(size=ROWS) > 1, 1.0, -1.0)
    objective, start = LinearObjective(LogisticLoss(), l2=0.01), np.zeros(FEATURES + 1)
    found = [
        optimizer.minimize(objective, {"X": each, "y": y}, start, on=ONE).w
        for each in (X, X.astype(np.float64))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)


def test_rows_of_weight_zero_have_no_effect() -> None:
    data, objective = rows_of(LogisticLoss()), LinearObjective(LogisticLoss(), l2=0.01)
    counted = data["sample_weight"] > 0
    without = {name: values[counted] for name, values in data.items()}
    data["X"][~counted] *= 1e6
    one, other = (
        Newton(tol=1e-10).minimize(objective, each, np.zeros(5), on=ONE) for each in (data, without)
    )
    assert np.allclose(one.w, other.w, rtol=0, atol=1e-9)


def test_two_classes_as_multinomial_are_those_of_the_binary_loss() -> None:
    data = rows_of(LogisticLoss())
    binary = LBFGS(500, 1e-10).minimize(LinearObjective(LogisticLoss(), l2=0.02), data, np.zeros(5), on=ONE)
    classes = data | {"y": (data["y"] > 0).astype(float)}
    # Each of the two rows of weights is half the binary one, so the sum of their squares is half of its.
    both = LBFGS(500, 1e-10).minimize(
        LinearObjective(MultinomialLoss(2), l2=0.04), classes, np.zeros((2, 5)), on=ONE
    )
    assert np.allclose(both.w[1] - both.w[0], binary.w, rtol=0, atol=1e-6)
    assert both.loss == pytest.approx(binary.loss, abs=1e-12)


@pytest.mark.parametrize("optimizer", [LBFGS(), OWLQN(), Newton()], ids=lambda x: type(x).__name__)
def test_separable_data_end_with_a_small_loss(optimizer: Optimizer) -> None:
    X = np.random.default_rng(0).normal(size=(30, 3))
    data = {"X": X, "y": np.where(X[:, 0] > 0, 1.0, -1.0)}
    result = optimizer.minimize(LinearObjective(LogisticLoss()), data, np.zeros(4), on=ONE)
    assert result.reason == "gradient"
    assert result.loss < 1e-4
    assert np.isfinite(result.w).all()


def test_one_class_only_is_predicted_with_certainty() -> None:
    data = {"X": np.random.default_rng(0).normal(size=(30, 3)), "y": np.ones(30)}
    result = LBFGS().minimize(LinearObjective(LogisticLoss(), l2=0.1), data, np.zeros(4), on=ONE)
    assert result.reason == "gradient"
    assert result.w[-1] > 10
    assert np.allclose(result.w[:-1], 0, atol=1e-4)


@pytest.mark.parametrize("loss", [HingeLoss(), PerceptronLoss()], ids=lambda x: type(x).__name__)
def test_sgd_minimizes_losses_with_kinks(loss: Loss) -> None:
    X = np.random.default_rng(0).normal(size=(100, 3))
    data = {"X": X, "y": np.where(X @ [1.0, -2.0, 0.5] > 0.2, 1.0, -1.0)}
    sgd = SGD(30, batch_size=25, learning_rate=1.0)
    result = sgd.minimize(LinearObjective(loss), data, np.zeros(4), on=ONE)
    right = np.sign(X @ result.w[:-1] + result.w[-1]) == data["y"]
    assert right.mean() > 0.95


def test_sgd_approaches_the_optimum_with_a_falling_rate() -> None:
    data, objective = rows_of(LogisticLoss()), LinearObjective(LogisticLoss(), l1=0.02, l2=0.01)
    best = OWLQN(tol=1e-9).minimize(objective, data, np.zeros(5), on=ONE)
    sgd = SGD(20, tol=0, batch_size=20, learning_rate=lambda batch: 1 / (1 + 0.05 * batch))
    result = sgd.minimize(objective, data, np.zeros(5), on=ONE)
    assert (result.n_iter, result.reason) == (20, "max_iter")
    assert 0 <= result.loss - best.loss < 1e-3


def test_sgd_ends_when_the_loss_falls_no_more() -> None:
    result = SGD(200, 1e-2, patience=2).minimize(
        LinearObjective(LogisticLoss(), l2=0.1), rows_of(LogisticLoss()), np.zeros(5), on=ONE
    )
    assert (result.converged, result.reason) == (True, "loss")
    assert result.n_iter < 200


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy: overflow
@pytest.mark.parametrize("optimizer", [LBFGS(), SGD(learning_rate=1e200)], ids=lambda x: type(x).__name__)
def test_a_loss_that_is_no_number_is_an_error(optimizer: Optimizer) -> None:
    data = rows_of(SquaredLoss())
    if isinstance(optimizer, LBFGS):
        data["X"][3, 1] = np.nan
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) after \d+ steps"):
        optimizer.minimize(LinearObjective(SquaredLoss()), data, np.zeros(5), on="threads:2")


def test_a_start_at_the_optimum_takes_no_step() -> None:
    data, objective = rows_of(SquaredLoss()), LinearObjective(SquaredLoss(), l2=0.01)
    best = Newton().minimize(objective, data, np.zeros(5), on=ONE)
    again = LBFGS().minimize(objective, data, best.w, on=ONE)
    assert (again.n_iter, again.reason, again.history) == (0, "gradient", [])
    assert (again.w == best.w).all()
    assert again.loss == best.loss


def test_the_report_gets_each_record() -> None:
    records: list[dict[str, float]] = []

    class Collector:
        def __deepcopy__(self, memo: object) -> Collector:
            return self  # tasks that are threads get copies

        def __call__(self, record: dict[str, float], w: Array) -> None:
            records.append(record)

    result = LBFGS().minimize(
        LinearObjective(LogisticLoss(), l2=0.1),
        rows_of(LogisticLoss()),
        np.zeros(5),
        on="threads:2",
        report=Collector(),
    )
    assert records == result.history


class Poisson(Objective):
    """Counts y with the mean exp(X w)."""

    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        scores = block.X @ w
        means = np.exp(scores)
        return (means - block.y * scores).sum(), block.X.T @ (means - block.y)


def test_an_objective_of_the_user() -> None:
    random = np.random.default_rng(0)
    X, w = random.normal(size=(300, 3)), np.array([0.5, -0.3, 0.1])
    data = {"X": X, "y": random.poisson(np.exp(X @ w))}
    result = LBFGS(tol=1e-9).minimize(Poisson(), data, np.zeros(3), on="threads:2")
    _, gradient = Poisson().loss_and_gradient(SimpleNamespace(**data), result.w)
    assert np.allclose(gradient, 0, atol=1e-6)
    with pytest.raises(RemoteError, match="Poisson has no method hessian: write it, or use LBFGS"):
        Newton().minimize(Poisson(), data, np.zeros(3), on=ONE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_objective_may_overflow_far_away() -> None:
    data = {"X": np.array([[1.0], [2.0]]), "y": np.array([3.0, 1.0])}
    far = LBFGS(tol=1e-9).minimize(Poisson(), data, [30.0], on=ONE)
    near = LBFGS(tol=1e-9).minimize(Poisson(), data, [0.0], on=ONE)
    assert far.converged
    assert np.allclose(far.w, near.w, atol=1e-7)


class ShapelessGradient(Objective):
    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        return 0.0, np.zeros(2)


class UphillGradient(Objective):
    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        return float((w**2).sum()), -2 * w


def test_mistakes_in_an_objective_are_named() -> None:
    with pytest.raises(
        RemoteError, match=r"gradient of shape \(2,\): expected a number, and the shape of w, \(3,\)"
    ):
        LBFGS().minimize(ShapelessGradient(), np.ones((5, 1)), np.zeros(3), on=ONE)
    result = LBFGS().minimize(UphillGradient(), np.ones((5, 1)), np.ones(3), on=ONE)
    assert (result.converged, result.reason) == (False, "no decrease")


def test_invalid_arguments_are_named() -> None:
    data = rows_of(SquaredLoss())
    for optimizer in (LBFGS(), Newton()):
        with pytest.raises(UsageError, match=r"this has l1=0.1: use OWLQN"):
            optimizer.minimize(LinearObjective(SquaredLoss(), l1=0.1), data, np.zeros(5))
    with pytest.raises(UsageError, match="l2=-1 is invalid"):
        OWLQN().minimize(LinearObjective(SquaredLoss(), l2=-1), data, np.zeros(5))
    with pytest.raises(RemoteError, match="the weights of all rows add up to 0"):
        LBFGS().minimize(
            LinearObjective(SquaredLoss()), data | {"sample_weight": np.zeros(ROWS)}, np.zeros(5), on=ONE
        )
    for invalid in ({"max_iter": 0}, {"batch_size": 0}, {"momentum": 1.0}):
        with pytest.raises(UsageError, match=f"{next(iter(invalid))}="):
            SGD(**invalid)
