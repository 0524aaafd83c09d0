"""What the optimizers decide, without rows and tasks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ronde.ml.optimizers import OWLQN, SGD, GradientDescent
from ronde.ml.optimizers.descent import (
    CurvaturePairs,
    LengthVerdict,
    align_direction,
    best_length,
    conjugate_gradients,
    judge_move,
    lengths_to_try,
    project_on_orthant,
    pseudo_gradient,
    solve_symmetric,
)
from ronde.ml.optimizers.optimizer import Optimizer, SearchState
from ronde.ml.optimizers.sgd import MiniBatches, shrunk

Array = NDArray[Any]
ACCEPT, SHORTER, LONGER = LengthVerdict.ACCEPT, LengthVerdict.TRY_SHORTER, LengthVerdict.TRY_LONGER


@pytest.mark.parametrize(
    ("length", "verdict"),
    [(1e-3, LONGER), (0.04, LONGER), (0.06, ACCEPT), (0.5, ACCEPT), (0.99, ACCEPT), (1.1, SHORTER)],
)
def test_lengths_on_a_parabola(length: float, verdict: LengthVerdict) -> None:
    # x^2 from x = 1 in the direction -2: the minimum is at length 0.5, and length 1 is as high as the start.
    end = 1 - 2 * length
    assert judge_move(1.0, -4 * length, end**2, -4 * end * length) is verdict


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_length_whose_loss_is_no_number_is_too_long(loss: float) -> None:
    assert judge_move(1.0, -1.0, loss, math.nan) is SHORTER


def test_among_losses_that_differ_by_rounding_the_slope_decides() -> None:
    assert judge_move(1.0, -1e-17, 1.0 + 2e-16, 1e-18) is ACCEPT
    assert judge_move(1.0, -1e-17, 1.0 + 2e-16, 1e-16) is SHORTER
    assert judge_move(1.0, -1e-3, 1.0 + 1e-9, 0.0) is SHORTER


def test_the_best_length_is_the_one_with_the_least_loss() -> None:
    assert best_length([1, 2, 3, 4], [5.0, 3.0, math.nan, 4.0], limit=6.0) == 2
    assert best_length([1, 2], [5.0, math.inf], limit=5.0) is None
    assert all(each < 3 for each in lengths_to_try(SHORTER, 3.0))
    assert all(each > 3 for each in lengths_to_try(LONGER, 3.0))


def symmetric(size: int) -> Array:
    root = np.random.default_rng(1).normal(size=(size, size))
    return root @ root.T + np.eye(size)


def test_as_many_pairs_as_weights_give_the_inverse_of_a_quadratic_function() -> None:
    # With exact line searches, L-BFGS knows the Hessian of n weights after n steps.
    matrix, w = symmetric(5), np.arange(1.0, 6.0)
    pairs = CurvaturePairs(5)
    for _ in range(5):
        gradient = matrix @ w
        direction = -pairs.solve(gradient)
        move = direction * -(direction @ gradient) / (direction @ matrix @ direction)
        pairs.add(move, matrix @ move)
        w = w + move
    assert np.allclose(w, 0, atol=1e-9)
    assert np.allclose(pairs.solve(matrix @ np.ones(5)), np.ones(5))


def test_the_recursion_is_the_product_with_the_matrix_of_bfgs() -> None:
    random, matrix = np.random.default_rng(2), symmetric(4)
    pairs = CurvaturePairs(3)
    moves = random.normal(size=(3, 4))
    changes = moves @ matrix
    for move, change in zip(moves, changes):
        pairs.add(move, change)
    inverse = np.eye(4) * (moves[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for move, change in zip(moves, changes):
        factor = np.eye(4) - np.outer(change, move) / (move @ change)
        inverse = factor.T @ inverse @ factor + np.outer(move, move) / (move @ change)
    vector = random.normal(size=4)
    assert np.allclose(pairs.solve(vector), inverse @ vector)


def test_pairs_without_curvature_are_left_out_and_old_ones_are_dropped() -> None:
    pairs = CurvaturePairs(2)
    pairs.add(np.ones(2), -np.ones(2))
    pairs.add(np.ones(2), np.zeros(2))
    assert len(pairs) == 0
    for scale in (1.0, 2.0, 3.0):
        pairs.add(np.ones(2), scale * np.ones(2))
    assert len(pairs) == 2
    assert np.allclose(pairs.solve(np.ones(2)), np.ones(2) / 3)


def test_the_pseudo_gradient_is_zero_exactly_where_the_penalty_holds_a_weight() -> None:
    w = np.array([0.0, 0.0, 0.0, 1.0, -1.0, 0.0])
    gradient = np.array([0.5, 2.0, -2.0, 0.5, 0.5, 2.0])
    factors = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    assert pseudo_gradient(w, gradient, factors).tolist() == [0.0, 1.0, -1.0, 1.5, -0.5, 2.0]


def test_a_step_stays_in_its_orthant() -> None:
    w = np.array([1.0, -1.0, 0.0, 0.0, 1.0])
    pseudo = np.array([2.0, -2.0, 1.0, -1.0, 2.0])
    factors = np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    moved = w - pseudo
    assert project_on_orthant(w, moved, pseudo, factors).tolist() == [0.0, 0.0, -1.0, 1.0, -1.0]
    assert align_direction(np.array([-1.0, -1.0, 1.0, 1.0, 1.0]), pseudo, factors).tolist() == [
        -1.0,
        0.0,
        0.0,
        1.0,
        1.0,
    ]


def test_the_step_of_the_penalty_stops_at_zero() -> None:
    assert shrunk(np.array([3.0, -3.0, 0.5, -0.5]), np.array([1.0, 1.0, 1.0, 0.0])).tolist() == [
        2.0,
        -2.0,
        0.0,
        -0.5,
    ]


def test_conjugate_gradients_solve_in_as_many_products_as_there_are_unknowns() -> None:
    matrix, vector = symmetric(6), np.arange(1.0, 7.0)
    products = []

    def product(x: Array) -> Array:
        products.append(x)
        return np.asarray(matrix @ x)

    assert np.allclose(matrix @ conjugate_gradients(product, vector, 1e-12, 100), vector)
    assert len(products) <= 7
    assert (
        conjugate_gradients(np.zeros_like, vector, 1e-12, 100) == vector
    ).all()  # flat: the direction of the vector


def test_a_direction_leads_downhill_also_where_the_function_is_flat_or_bends_down() -> None:
    vector = np.array([1.0, 1.0, 1.0])
    assert np.allclose(solve_symmetric(np.diag([2.0, 4.0, -4.0]), vector), [0.5, 0.25, 0.25])
    assert np.allclose(solve_symmetric(np.diag([2.0, 4.0, 0.0]), vector), [0.5, 0.25, 0.25])
    assert np.allclose(solve_symmetric(np.zeros((3, 3)), vector), vector)


@pytest.mark.parametrize(("rows", "num_batches"), [(10, 3), (3, 10), (7, 7), (0, 4)])
def test_each_row_of_a_block_is_in_one_batch_of_a_pass(rows: int, num_batches: int) -> None:
    batches = MiniBatches(0, 5, num_batches)
    drawn = [batches.rows(number, 11, rows).tolist() for number in range(num_batches)]
    assert sorted(row for batch in drawn for row in batch) == list(range(rows))
    again = MiniBatches(0, 5, num_batches)
    assert [again.rows(number, 11, rows).tolist() for number in range(num_batches)] == drawn


def test_no_batch_is_large_also_if_blocks_have_fewer_rows_than_there_are_batches() -> None:
    batches = MiniBatches(0, 0, 100)
    sizes = [sum(len(batches.rows(number, block, 10)) for block in range(64)) for number in range(100)]
    assert sum(sizes) == 640
    assert max(sizes) <= 3 * 640 / 100


def test_the_rate_of_a_batch() -> None:
    assert [SGD(learning_rate=0.5, decay=1.0)._rate(batch) for batch in (0, 1, 4)] == [0.5, 0.25, 0.1]
    assert SGD(learning_rate=lambda batch: 2.0**-batch)._rate(3) == 0.125


class QuadraticTotal:
    """Stands for SummedObjective: w . matrix . w / 2 - sum w_j + l1 sum |w_j|. Counts the sums over all tasks."""

    def __init__(self, matrix: Array, l1: float) -> None:
        self._matrix, self._l1 = matrix, l1
        self.sums: list[str] = []

    def _value(self, w: Array) -> float:
        return float(w @ self._matrix @ w / 2 - w.sum() + self._l1 * np.abs(w).sum())

    def loss_and_gradient(self, w: Array) -> tuple[float, Array]:
        self.sums.append("loss and gradient")
        return self._value(w), self._matrix @ w - 1

    def gradient_norm(self, gradient: Array) -> float:
        return float(np.abs(gradient).max())

    def losses(self, points: Array) -> list[float]:
        self.sums.append("losses")
        return [self._value(w) for w in points]

    def l1_factors(self, w: Array) -> Array:
        return np.full_like(w, self._l1)


@pytest.mark.parametrize(
    "optimizer", [OWLQN(tol=1e-4), GradientDescent(tol=1e-4)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("l1", [0.0, 0.5])
def test_a_step_sums_over_all_tasks_once_or_three_times(optimizer: Optimizer, l1: float) -> None:
    total: Any = QuadraticTotal(np.diag([1e-3, 1.0, 50.0]), l1)
    search = SearchState(np.array([3.0, -2.0, 1.0]), optimizer.first_memory())
    search.loss, search.gradient = total.loss_and_gradient(search.w)
    kinds = set()
    while search.reason is None:
        total.sums.clear()
        before = search.loss
        optimizer.advance(search, total)
        kinds.add(tuple(total.sums))
        assert search.loss <= before + 1e-14 * abs(before)
    assert search.reason == "gradient"
    assert kinds == {("loss and gradient",), ("loss and gradient", "losses", "loss and gradient")}
    assert np.allclose(search.w, (1 - l1) / np.array([1e-3, 1.0, 50.0]), rtol=1e-2)
