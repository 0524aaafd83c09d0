"""The search that proposes points to the tuner."""

from __future__ import annotations

import random

import pytest

from ronde.engine.tuner import BayesianSearch

pytest.importorskip("bayes_opt")

Known = list[tuple[tuple[float, ...], float]]


def speed(point: tuple[float, ...]) -> float:
    """Best at (0.7, 0.2), where it is 1 GB/s; a factor of 8 slower half an axis away."""
    return 1e9 / 8 ** (2 * sum(abs(at - best) for at, best in zip(point, (0.7, 0.2))))


def found(seed: int, trials: int) -> Known:
    chooser = random.Random(seed)
    search = BayesianSearch(2, seed)
    known: Known = [((0.0, 1.0), speed((0.0, 1.0))), ((0.5, 0.5), speed((0.5, 0.5)))]
    while len(known) < trials:
        point = search.propose(known)
        known.append((point, speed(point) * chooser.uniform(0.9, 1.1)))
    return known


def test_it_finds_what_is_good_and_does_so_again() -> None:
    known = found(1, 16)
    assert all(len(point) == 2 and min(point) >= 0 and max(point) <= 1 for point, _ in known)
    assert max(speed(point) for point, _ in known) > 0.6e9  # it began with 0.2e9
    assert found(1, 8) == known[:8]
    assert found(2, 8) != known[:8]
