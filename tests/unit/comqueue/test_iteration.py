from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import IterationStep, iterate
from ronde.errors import RemoteError, UsageError

THREE = "threads:3"


def test_state_data_and_the_end() -> None:
    def step(c: IterationStep) -> None:
        total = c.sum({"x": c.data.x.sum(), "n": len(c.data.x)})
        c.state.mean = float(total["x"] / total["n"])
        c.state.last = (c.step_no, c.num_tasks)
        c.stop_if(c.step_no == 2)

    given = {"mean": 0.0, "last": None}
    result = iterate(step, data={"x": np.arange(7), "y": np.arange(7)}, state=given, max_iter=9, on=THREE)
    assert result.state == SimpleNamespace(mean=3.0, last=(2, 3))
    assert (result.steps, result.stopped) == (2, True)
    assert given == {"mean": 0.0, "last": None}


def test_the_last_step_by_number() -> None:
    result = iterate(lambda c: None, data=[1, 2, 3], state={}, max_iter=4, on=THREE)
    assert (result.steps, result.stopped) == (4, False)


def test_operations_leave_their_argument() -> None:
    def step(c: IterationStep) -> None:
        mine = np.array([c.task_id, -c.task_id])
        c.state.found = [c.sum(mine), c.max(mine), c.min(mine), c.reduce(mine, lambda a, b: 10 * a + b)]
        assert mine.tolist() == [c.task_id, -c.task_id]
        c.state.others = [c.gather(c.task_id), c.broadcast(c.task_id, root=2), c.sum(1.5)]

    found = iterate(step, data=[0] * 3, state={}, max_iter=1, on=THREE).state
    assert [each.tolist() for each in found.found] == [[3, -3], [2, 0], [0, -2], [12, -12]]
    assert found.others == [[0, 1, 2], 2, 4.5]


def test_least_squares_by_gradient_descent() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(60, 3)), np.array([1.0, -2.0, 0.5])

    def step(c: IterationStep) -> None:
        gradient = c.sum(c.data.x.T @ (c.data.x @ c.state.w - c.data.y))
        c.state.w = c.state.w - 1e-2 * gradient
        c.stop_if(abs(gradient).max() < 1e-9)

    result = iterate(step, data={"x": x, "y": x @ w}, state={"w": np.zeros(3)}, max_iter=500, on=THREE)
    assert result.stopped
    assert np.allclose(result.state.w, w, atol=1e-10)


def test_an_error_names_the_step_function() -> None:
    def unlucky(c: IterationStep) -> Any:
        return c.data[c.step_no]

    with pytest.raises(RemoteError, match=r"unlucky failed on task . in step 1: IndexError"):
        iterate(unlucky, data=[1, 2, 3], state={}, max_iter=2, on=THREE)


def after_other_blocks(c: IterationStep) -> None:
    def sum_of(block: Any) -> Any:
        return next(iter([])) if block[0] == 2 else block.sum()

    c.state.total = c.sum_blocks(sum_of)


def one_task_by_max(c: IterationStep) -> None:
    c.max(1.0) if c.task_id == 1 else c.sum(1.0)


def one_task_without(c: IterationStep) -> None:
    if c.task_id != 1:
        c.gather(1)


def truth(value: Any) -> Callable[[IterationStep], None]:
    def step(c: IterationStep) -> None:
        c.sum(value)

    return step


def leave(error: type[BaseException], *arguments: object) -> Callable[[IterationStep], None]:
    def step(c: IterationStep) -> None:
        raise error(*arguments)

    return step


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (after_other_blocks, r"after_other_blocks failed on task 0 .*generator raised StopIteration"),
        (
            one_task_by_max,
            "task 0 called sum in one_task_by_max in step 1, while task 1 called max in one_task_by_max",
        ),
        (
            one_task_without,
            "task 0 called gather in one_task_without in step 1, while task 1 had ended step 1",
        ),
        (truth(np.ones(2, np.longdouble)), "the dtype float128 is not supported; convert it to .*float64"),
        (truth(np.timedelta64(3, "D")), r"the dtype timedelta64\[D\] is not supported"),
        (truth(np.ma.masked_array([1.0], [True])), "operation 1 is a masked array, whose mask would be lost"),
        (truth(2**63), "operation 1 is an int of more than 64 bits"),
        (lambda c: c.max(1j), "there is no max of complex128 values"),
        (leave(SystemExit, 3), r"task 0 failed: SystemExit\(3\)"),
        (leave(KeyboardInterrupt), r"task 0 failed: KeyboardInterrupt\(\)"),
    ],
)
def test_mistakes_in_a_step_fail_in_threads_as_in_processes(
    step: Callable[[IterationStep], None], message: str
) -> None:
    with pytest.raises(RemoteError, match=message):
        iterate(step, data=np.arange(9.0), state={}, max_iter=2, on=THREE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 3}, "step must be a function of an IterationStep, not 3"),
        ({"state": [1]}, r"state must be a dict of objects by name, such as .*, not \[1\]"),
        ({"state": {1: 2}}, "state must be a dict of objects by name"),
        ({"data": {}}, "data is an empty dict"),
        ({"on": 2}, "on=2 is invalid: expected a text such as 'local:2', or a Cluster"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"step": lambda c: None, "data": [1], "state": {}, "max_iter": 1, "on": THREE}
    with pytest.raises(UsageError, match=message):
        iterate(**{**valid, **arguments})
