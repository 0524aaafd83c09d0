"""Mistakes in a queue or a step: threads and processes give errors with the same text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import (
    AllReduce,
    ComContext,
    CommunicateFunction,
    ComQueue,
    IterationStep,
    IterativeComQueue,
    TaskGroup,
    iterate,
)
from ronde.errors import RemoteError

Run = Callable[[str], Any]


def text_of(run: Run, on: str) -> str:
    """Return the first line of the error, without the words about the process of the task."""
    with pytest.raises(RemoteError) as caught:
        run(on)
    line = str(caught.value).splitlines()[0]
    return re.sub(r"^(task|rank) \d (\(pid \d+\) )?failed: ((Step|Mismatch)Error: )?", "", line)


# Queues. Functions fail on one task only, so that the error is always that of this task.


def put_buffer(context: ComContext) -> None:
    context.put_obj("buffer", np.ones(4))
    context.put_obj("used", 4 + context.task_id)


def wrong_length(on: str) -> Any:
    return ComQueue().add(put_buffer).add(AllReduce("buffer", "used")).exec(on)


def other_length(on: str) -> Any:
    return ComQueue().add(put_shorter).add(AllReduce("buffer", "used")).exec(on)


def put_shorter(context: ComContext) -> None:
    context.put_obj("buffer", np.ones(4))
    context.put_obj("used", 4 - context.task_id)


def put_on_task_0(context: ComContext) -> None:
    if context.task_id == 0:
        context.put_obj("sums", np.ones(2))


def use_sums(context: ComContext) -> None:
    context.get_obj("sums")


def missing_object(on: str) -> Any:
    return ComQueue().add(put_on_task_0).add(use_sums).exec(on)


def object_of_one_task(on: str) -> Any:
    return ComQueue().add(put_on_task_0).add(AllReduce("sums")).exec(on)


def bad_criterion(context: ComContext) -> bool:
    raise ValueError("no luck")


def failing_criterion(on: str) -> Any:
    queue = IterativeComQueue().set_max_iter(3).add(put_buffer)
    return queue.set_compare_criterion_of_node0(bad_criterion).exec(on)


def bad_close(context: ComContext) -> None:
    if context.task_id == 1:
        raise ValueError("no luck")


def failing_close(on: str) -> Any:
    return IterativeComQueue().set_max_iter(3).add(put_buffer).close_with(bad_close).exec(on)


class Neighbour(CommunicateFunction):
    """Calls different operations of the group."""

    def __repr__(self) -> str:
        return "Neighbour()"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        if group.task_id == 0:
            group.allgather_object(None)
        else:
            group.alltoall(np.ones(2), [1, 1])


def different_calls_in_a_function(on: str) -> Any:
    return ComQueue().add(Neighbour()).exec(on)


# Steps of iterate


def stepping(step: Callable[[IterationStep], Any]) -> Run:
    return lambda on: iterate(step, data=np.ones((12, 2)), state={}, max_iter=2, on=on)


def sum_on_task_1(c: IterationStep) -> None:
    if c.task_id:
        c.sum(1.0)


def max_on_task_1(c: IterationStep) -> None:
    c.max(1.0) if c.task_id else c.sum(1.0)


def gather_on_task_0(c: IterationStep) -> None:
    c.sum(1.0) if c.task_id else c.gather(1.0)


def two_roots(c: IterationStep) -> None:
    c.broadcast(1.0, root=c.task_id)


def blocks_on_task_1(c: IterationStep) -> None:
    c.sum_blocks(len) if c.task_id else c.sum(1.0)


CASES = [
    (
        wrong_length,
        (
            "AllReduce('buffer') failed on task 1 in step 1: UsageError: the length 'used' is 5 on task 1 in step 1, "
            "but 'buffer' has 4 elements"
        ),
    ),
    (
        other_length,
        (
            "AllReduce('buffer') in step 1: object 'buffer' is float64 (4,), of which 4 elements on task 0 and float64 "
            "(4,), of which 3 elements on task 1: expected one structure, dtype and shape on all tasks"
        ),
    ),
    (
        missing_object,
        (
            "use_sums failed on task 1 in step 1: UsageError: there is no object 'sums' on task 1 in step 1: the "
            "task has none"
        ),
    ),
    (
        object_of_one_task,
        (
            "AllReduce('sums') in step 1: object 'sums' is float64 (2,) on task 0 and missing on task 1: expected one "
            "structure, dtype and shape on all tasks"
        ),
    ),
    (failing_criterion, "bad_criterion failed on task 0 in step 1: ValueError: no luck"),
    (failing_close, "bad_close failed on task 1 in step 3: ValueError: no luck"),
    (
        different_calls_in_a_function,
        "Neighbour() in step 1: task 0 called allgather_object, but task 1 called alltoall of float64",
    ),
    (
        stepping(sum_on_task_1),
        "task 0 had ended step 1, while task 1 called sum in sum_on_task_1 in step 1",
    ),
    (
        stepping(max_on_task_1),
        "task 0 called sum in max_on_task_1 in step 1, while task 1 called max in max_on_task_1 in step 1",
    ),
    (
        stepping(gather_on_task_0),
        "task 0 called gather in gather_on_task_0 in step 1, while task 1 called sum in gather_on_task_0 in step 1",
    ),
    (
        stepping(two_roots),
        (
            "task 0 called broadcast from task 0 in two_roots in step 1, while task 1 called broadcast from task 1 in "
            "two_roots in step 1"
        ),
    ),
    (
        stepping(blocks_on_task_1),
        "task 0 called sum in blocks_on_task_1 in step 1, while task 1 called sum_blocks in blocks_on_task_1 in step 1",
    ),
]


@pytest.mark.parametrize("on", ["threads:2", pytest.param("local:2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("run", "text"), CASES, ids=range(len(CASES)))
def test_a_mistake_has_one_text_in_threads_and_processes(run: Run, text: str, on: str) -> None:
    assert text_of(run, on) == text


@pytest.mark.parametrize("run", [failing_criterion, stepping(gather_on_task_0)])
def test_some_mistakes_in_processes(run: Run) -> None:
    assert text_of(run, "local:2") == text_of(run, "threads:2")
