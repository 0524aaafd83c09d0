"""The limit of a step, learnt from the steps before."""

from __future__ import annotations

import pytest

from ronde.elastic.step_times import StepRule, StepTimes
from ronde.errors import UsageError

MS = 10**6
RULE = StepRule(factor=10, least_ns=50 * MS, quantile=0.9, num_steps=5)


def after(*took_ms: float, rule: StepRule = RULE) -> StepTimes:
    """The times after a first step, which takes long, and these."""
    times = StepTimes(rule)
    for took in (5000, *took_ms):
        times.add(round(took * MS))
    return times


def test_there_is_no_limit_before_enough_steps_are_known() -> None:
    assert StepTimes(RULE).limit_ns is None
    assert after(100, 100, 100, 100).limit_ns is None
    assert after(100, 100, 100, 100, 100).limit_ns == 1000 * MS


def test_short_steps_have_the_shortest_limit() -> None:
    assert after(*[0.1] * 10).limit_ns == 50 * MS


def test_a_few_long_steps_do_not_raise_it_much_but_may_happen_again() -> None:
    assert after(*[100] * 50, 300, 100).limit_ns == 1000 * MS
    assert after(*[100] * 50, 3000, 100).limit_ns == 6000 * MS
    assert after(3000, *[100] * 1000).limit_ns == 6000 * MS


def test_it_follows_a_program_that_becomes_slower() -> None:
    assert after(*[100] * 300, *[400] * 50).limit_ns == 4000 * MS


def test_the_step_after_a_change_does_not_count() -> None:
    times = after(*[100] * 10)
    times.interrupt()
    assert times.limit_ns is None
    times.add(60_000 * MS)
    assert times.limit_ns == 1000 * MS


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"least_ns": -1}, {"quantile": 0}, {"num_steps": 0}])
def test_a_wrong_rule_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        StepRule(**wrong)  # type: ignore[arg-type]
