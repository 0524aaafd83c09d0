"""Which part of a timeline the picture shows if nobody says."""

from __future__ import annotations

import argparse

from draw_timeline import Span, windows_of

ENGINE, TENSOR, RARE = (0, 1), (0, 2), (0, 3)


def options(steps: int = 1) -> argparse.Namespace:
    return argparse.Namespace(window=None, steps=steps)


def steps_of(tensor: tuple[int, int], count: int) -> list[Span]:
    return [Span(tensor, "negotiate", 10.0 * step, 2.0) for step in range(count)]


def test_a_step_from_the_middle_though_the_engine_has_the_row_in_the_middle() -> None:
    operations = [Span(ENGINE, "operation", 10.0 * step + 5, 1.0) for step in range(9)] * 3
    spans = sorted(steps_of(TENSOR, 9) + operations, key=lambda span: span.begin_ms)
    assert windows_of(spans, options()) == [(40.0, 50.0)]
    assert windows_of(spans, options(steps=3)) == [(40.0, 70.0)]
    assert windows_of(spans, options(steps=100)) == [(40.0, 80.0)]


def test_the_tensor_that_is_used_most_often_gives_the_step() -> None:
    spans = [*steps_of(RARE, 1), *steps_of(TENSOR, 2)]
    assert windows_of(spans, options()) == [(0.0, 10.0)]


def test_everything_if_no_tensor_is_used_twice() -> None:
    spans = [Span(RARE, "negotiate", 1.0, 8.0), Span(ENGINE, "operation", 2.0, 3.0)]
    assert windows_of(spans, options()) == [(1.0, 9.0)]
