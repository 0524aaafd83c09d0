from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import IterationStep, iterate
from ronde.comqueue.agreement import is_checked_after
from ronde.errors import RemoteError

ROWS = np.arange(7.0)


def after(
    change: Any, state: dict[str, Any] | None = None, max_iter: int = 3, tasks: int = 3
) -> SimpleNamespace:
    """The state after steps that change it. `change`: gets the step."""
    result: SimpleNamespace = iterate(
        change,
        data=ROWS,
        state={"w": 0.0} if state is None else state,
        max_iter=max_iter,
        on=f"threads:{tasks}",
    ).state
    return result


def put(c: IterationStep, value: Any) -> None:
    c.sum(0)
    c.state.w = value


def test_a_forgotten_sum_is_an_error_after_the_first_step() -> None:
    def forgetful(c: IterationStep) -> None:
        c.state.w = c.state.w + c.data.sum()

    message = (
        r"forgetful in step 1: the state differs between tasks: w is 3\.0 on task 0 and 7\.0 on task 1 \(all other "
        r"tasks differ from task 0\)\. .* for example by c\.sum"
    )
    with pytest.raises(RemoteError, match=message):
        after(forgetful)
    assert after(forgetful, tasks=1).w == 3 * ROWS.sum()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda c: {"a": [1, c.task_id // 2]},
            r"w\['a'\]\[1\] is 0 on task 0 and 1 on task 2 \(task 2 differs",
        ),
        (
            lambda c: np.arange(6).reshape(2, 3) * (c.task_id or 1) ** 2,
            r"w is 1 at \[0, 1\] on task 0 and 4 at",
        ),
        (lambda c: np.eye(1, 99999, 99990 - c.task_id), r"w is 0\.0 at \[0, 99989\] on task 0 and 1\.0 at"),
        (lambda c: np.eye(1, 99999, c.task_id), r"w is 1\.0 at \[0, 0\] on task 0 and 0\.0 at"),
        (lambda c: np.zeros(c.task_id), r"w is float64 \(0,\) on task 0 and float64 \(1,\) on task 1"),
        (
            lambda c: 1e-9 * (1 + (c.task_id == 1)),
            r"w is 1e-09 on task 0 and 2e-09 on task 1",
        ),  # small, but not equal
        (lambda c: "ab"[c.task_id > 1], r"w is 'a' on task 0 and 'b' on task 2"),
        (lambda c: [0] * (c.task_id + 1), r"w is list of 1 on task 0 and list of 2 on task 1"),
        (lambda c: None if c.task_id else 1, r"w is 1 on task 0 and NoneType of 0 on task 1"),
        (lambda c: 10**30 + c.task_id, r"w is 10{30} on task 0 and 10{29}1 on task 1"),
        (
            lambda c: {"key": {c.task_id}} if c.task_id < 2 else {},
            r"w is dict of 1 on task 0 and dict of 0 on task 2",
        ),
    ],
)
def test_the_attribute_and_the_tasks_are_named(value: Any, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        after(lambda c: put(c, value(c)))


def test_an_attribute_that_one_task_lacks_is_named() -> None:
    def step(c: IterationStep) -> None:
        c.sum(0)
        if c.task_id == 1:
            c.state.extra = 1

    with pytest.raises(RemoteError, match=r"extra is missing on task 0 and 1 on task 1 \(task 1 differs"):
        after(step)


def test_the_last_step_is_always_compared() -> None:
    assert [step for step in range(1, 5000) if is_checked_after(step)] == [
        *(1, 4, 16, 64, 256),
        *(1024, 2048, 3072, 4096),
    ]
    with pytest.raises(RemoteError, match="in step 7: the state differs"):
        after(lambda c: put(c, c.task_id if c.step_no == 7 else 0), max_iter=7)
    assert after(lambda c: put(c, c.task_id if c.step_no == 6 else 0), max_iter=7).w == 0


@pytest.mark.parametrize(
    "value",
    [
        lambda c: np.nan,
        lambda c: np.array([1.0, 1 + c.task_id * 1e-12, np.inf]),  # as of another machine
        lambda c: 1e12 + c.task_id,
        lambda c: {("a", c.step_no): 1, "b": (2, None, b"c")},
        lambda c: dict(sorted({"a": 1, "b": 2}.items(), reverse=bool(c.task_id))),
        lambda c: object(),
        lambda c: np.array(["2026-11-27"], "datetime64[D]"),
        lambda c: np.zeros((0, 3)),
        lambda c: np.arange(12.0).reshape(3, 4).T[::2],
    ],
)
def test_equal_states_pass(value: Any) -> None:
    after(lambda c: put(c, value(c)))


def test_an_attribute_with_an_underscore_belongs_to_a_task() -> None:
    def step(c: IterationStep) -> None:
        c.sum(0)
        c.state._mine = c.task_id

    assert after(step)._mine == 0


def test_what_finish_leaves_in_the_state_is_not_compared() -> None:
    def finish(c: IterationStep) -> float:
        c.state.mine = c.task_id
        return float(c.state.mine)

    result = iterate(lambda c: None, data=ROWS, state={}, max_iter=1, on="threads:3", finish=finish)
    assert list(result.outputs) == [0, 1, 2]


def test_a_step_that_combines_nothing_warns_if_tasks_have_equal_sums_by_chance() -> None:
    def forgetful(c: IterationStep) -> None:
        c.state.w = c.state.w + c.data.sum()

    options: dict[str, Any] = dict(data=np.ones(100), state={"w": 0.0}, max_iter=3)
    with pytest.warns(
        RuntimeWarning,
        match="forgetful reads this task's rows, changes the state and combines nothing: .* If what it sets depends on",
    ):
        assert iterate(forgetful, on="threads:2", **options).state.w == 150
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(forgetful, on="threads:1", **options)
        iterate(lambda c: c.data.sum(), on="threads:2", **options)  # the state stays
        iterate(lambda c: put(c, c.sum_blocks(np.sum)), on="threads:2", **options)
