"""The queue's rules, with tasks as threads; tests/ranks/comqueue runs it in processes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ronde.comqueue import (
    MAX,
    MIN,
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    ComContext,
    CommunicateFunction,
    CompareCriterionFunction,
    CompleteResultFunction,
    ComputeFunction,
    ComQueue,
    Gather,
    IterativeComQueue,
    Partitions,
    ReduceScatter,
    TaskGroup,
)
from ronde.comqueue.task_group import piece_owners
from ronde.errors import MismatchError, RemoteError, UsageError
from ronde.types import Average, Product

THREE = "threads:3"


def put(name: str, value: Callable[[ComContext], Any]) -> Callable[[ComContext], None]:
    return lambda context: context.put_obj(name, value(context))


def got(name: str) -> Callable[[ComContext], Any]:
    return lambda context: context.get_obj(name)


def communicated(
    function: CommunicateFunction, value: Callable[[ComContext], Any], on: str = THREE
) -> list[Any]:
    """Return what the object x of each task is after a function of communication."""
    return ComQueue().add(put("x", value)).add(function).close_with(got("x")).exec(on)


# Steps


def test_steps_count_from_one_and_functions_run_in_order() -> None:
    seen: list[tuple[int, str]] = []
    queue = IterativeComQueue().set_max_iter(2)
    queue.add(lambda context: seen.append((context.step_no, "a")))
    queue.add(lambda context: seen.append((context.step_no, "b")))
    assert queue.exec("threads:1") == [None]
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_queue_without_iteration_passes_once() -> None:
    assert ComQueue().close_with(lambda context: context.step_no).exec(THREE) == [1, 1, 1]


def test_the_criterion_of_task_0_ends_all_tasks() -> None:
    class AtStepFour(CompareCriterionFunction):
        def calc(self, context: ComContext) -> bool:
            assert context.task_id == 0
            return context.step_no == 4

    class LastStep(CompleteResultFunction):
        def calc(self, context: ComContext) -> int:
            return context.step_no

    queue = IterativeComQueue().set_compare_criterion_of_node0(AtStepFour()).close_with(LastStep())
    assert queue.exec(THREE) == [4, 4, 4]
    assert queue.set_max_iter(2).exec(THREE) == [2, 2, 2]


def test_each_run_begins_with_copies_of_functions_and_data() -> None:
    class Counter(ComputeFunction):
        def __init__(self) -> None:
            self.calls = 0

        def calc(self, context: ComContext) -> None:
            self.calls += 1
            context.get_obj("rows")[:] = 7
            context.put_obj("calls", self.calls)

    rows = np.zeros(3)
    queue = IterativeComQueue().init_with_partitioned_data("rows", rows).add(Counter()).set_max_iter(2)
    queue.close_with(got("calls"))
    assert queue.exec(THREE) == queue.exec(THREE) == [2, 2, 2]
    assert rows.tolist() == [0, 0, 0]


# Objects


def test_a_task_sees_its_objects_only() -> None:
    queue = (
        ComQueue().add(put("mine", lambda context: context.task_id)).add(Barrier()).close_with(got("mine"))
    )
    assert queue.exec(THREE) == [0, 1, 2]


def test_two_runs_at_once_see_their_objects_only() -> None:
    both = threading.Barrier(2, timeout=60)
    results: dict[int, list[Any]] = {}

    def run(number: int) -> None:
        def meet(context: ComContext) -> None:
            if context.task_id == 0:
                both.wait()

        queue = ComQueue().add(put("x", lambda _: number)).add(meet).add(AllReduce("x")).close_with(got("x"))
        results[number] = queue.exec("threads:2")

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [2, 2], 10: [20, 20]}


def test_data_is_there_before_the_first_step() -> None:
    queue = ComQueue().init_with_partitioned_data("rows", np.arange(4)).init_with_broadcast_data("k", 3)
    queue.close_with(lambda context: (context.get_obj("rows").tolist(), context.get_obj("k")))
    assert queue.exec(THREE) == [([0, 1], 3), ([2], 3), ([3], 3)]
    with pytest.raises(UsageError, match="already data named 'k'"):
        queue.init_with_partitioned_data("k", [])


def test_objects_are_put_replaced_and_removed() -> None:
    context = ComContext(1, 2)
    context.put_obj("a", 1)
    context.put_obj("a", 2)
    assert context.contains_obj("a")
    assert context.remove_obj("a") == 2
    assert not context.contains_obj("a")
    context.put_obj("b", None)
    with pytest.raises(UsageError, match="no object 'a' on task 1 in step 1: the task has 'b'"):
        context.get_obj("a")
    with pytest.raises(UsageError, match="must be a str, not 3"):
        context.put_obj(3, "x")  # type: ignore[arg-type]


# Communication


@pytest.mark.parametrize("op", [None, lambda a, b: a + b])
@pytest.mark.parametrize("length", [0, 1, 15, 4096, 4097, 3 * 4096 + 5])
def test_an_all_reduce_sums_in_the_order_of_tasks_and_in_place(op: Any, length: int) -> None:
    parts = [np.random.default_rng(task).normal(size=length) * 10.0**task for task in range(3)]
    expected = (parts[0] + parts[1]) + parts[2]
    queue = ComQueue().init_with_partitioned_data("x", Partitions(parts))
    queue.add(put("same", got("x"))).add(AllReduce("x", op=op) if op else AllReduce("x"))
    queue.close_with(lambda context: (context.get_obj("x"), context.get_obj("x") is context.get_obj("same")))
    for result, is_in_place in queue.exec(THREE):
        assert np.array_equal(result, expected)
        assert is_in_place


@pytest.mark.parametrize(
    ("op", "expected"), [(MAX, 2), (MIN, 0), (Product, 0), (Average, 1), (lambda a, b: a * 10 + b, 12)]
)
def test_other_reductions_and_scalars(op: Any, expected: int) -> None:
    results = communicated(AllReduce("x", op=op), lambda context: context.task_id)
    assert results == [expected] * 3
    assert type(results[0]) is int


def test_trees_of_arrays_are_reduced_leaf_by_leaf() -> None:
    def tree(context: ComContext) -> dict[str, Any]:
        items = {"n": context.task_id, "sums": [np.full((2, 2), 0.5), np.ones(1, np.float32)], "of": None}
        return dict(reversed(items.items())) if context.task_id else items

    for result in communicated(AllReduce("x"), tree):
        assert result["n"] == 3
        assert result["sums"][0].tolist() == [[1.5, 1.5]] * 2
        assert (result["sums"][1].tolist(), result["sums"][1].dtype) == ([3.0], np.float32)


def test_arrays_that_are_not_contiguous_keep_their_place() -> None:
    def transposed(context: ComContext) -> NDArray[Any]:
        return np.arange(6.0).reshape(2, 3).T

    assert (
        communicated(AllReduce("x"), transposed)[1].tolist() == (3 * np.arange(6.0).reshape(2, 3).T).tolist()
    )


def test_only_the_first_elements_of_a_buffer() -> None:
    queue = ComQueue().add(put("x", lambda _: np.ones(4))).add(put("used", lambda _: 2))
    queue.add(AllReduce("x", "used")).close_with(lambda context: context.get_obj("x").tolist())
    assert queue.exec(THREE) == [[3, 3, 1, 1]] * 3


def test_a_wrong_length_is_an_error() -> None:
    queue = (
        ComQueue()
        .add(put("x", lambda _: np.ones(4)))
        .add(put("used", lambda _: 5))
        .add(AllReduce("x", "used"))
    )
    with pytest.raises(
        RemoteError, match=r"the length 'used' is 5 on task . in step 1, but 'x' has 4 elements"
    ):
        queue.exec(THREE)


def test_the_other_functions_of_communication() -> None:
    rows = communicated(ReduceScatter("x"), lambda context: np.arange(4.0) + context.task_id)
    assert [row.tolist() for row in rows] == [[3, 6], [9], [12]]
    assert communicated(Broadcast("x", 1), lambda context: {"from": context.task_id}) == [{"from": 1}] * 3
    assert communicated(AllGather("x"), lambda context: "abc"[context.task_id]) == [["a", "b", "c"]] * 3
    assert communicated(Gather("x", 2), lambda context: context.task_id) == [0, 1, [0, 1, 2]]


def test_a_broadcast_object_need_not_exist_on_other_tasks() -> None:
    def only_task_0(context: ComContext) -> None:
        if context.task_id == 0:
            context.put_obj("x", 5)

    assert ComQueue().add(only_task_0).add(Broadcast("x")).close_with(got("x")).exec(THREE) == [5, 5, 5]


def test_a_function_of_communication_by_a_user() -> None:
    class Neighbour(CommunicateFunction):
        def communicate(self, context: ComContext, group: TaskGroup) -> None:
            everyone = group.allgather_object(context.get_obj("x"))
            context.put_obj("x", everyone[(group.task_id + 1) % group.num_tasks])

    assert communicated(Neighbour(), lambda context: context.task_id) == [1, 2, 0]


@pytest.mark.parametrize("length", [0, 1, 4096, 4097, 10 * 4096, 11 * 4096 + 1])
@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
def test_the_owners_of_pieces(length: int, tasks: int) -> None:
    counts = piece_owners(length, tasks)
    assert sum(counts) == length
    pieces = -(-length // 4096)
    for task, count in enumerate(counts):
        assert -(-count // 4096) == pieces // tasks + (task < pieces % tasks)


# Errors


def failing(function: Callable[[ComContext], Any], **add: Any) -> str:
    queue = IterativeComQueue().set_max_iter(3).add(function).add(Barrier())
    with pytest.raises(RemoteError) as caught:
        queue.exec(THREE)
    return str(caught.value).splitlines()[0]


def test_an_exception_names_task_step_and_function() -> None:
    def explode(context: ComContext) -> None:
        if (context.task_id, context.step_no) == (1, 2):
            raise ValueError("no luck")

    message = failing(explode)
    assert "task 1" in message
    assert re.search(r"explode failed on task 1 in step 2: ValueError: no luck$", message)


def test_a_criterion_without_truth_value_is_named() -> None:
    queue = IterativeComQueue().set_max_iter(2).add(lambda context: None)
    queue.set_compare_criterion_of_node0(cast(Any, lambda context: np.ones(2)))
    with pytest.raises(
        RemoteError, match=r"<lambda> failed on task 0 in step 1: ValueError: The truth value"
    ):
        queue.exec(THREE)


def test_a_missing_object_is_named() -> None:
    assert "no object 'sums' on task 0 in step 1: the task has none" in failing(got("sums"))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (
            lambda context: np.ones(2 + (context.task_id == 2)),
            r"float64 \(2,\) on task 0 and float64 \(3,\) on task 2",
        ),
        (
            lambda context: np.ones(2, "fd"[context.task_id % 2]),
            r"float32 \(2,\) on task 0 and float64 \(2,\) on task 1",
        ),
        (
            lambda context: [1] if context.task_id == 1 else 1,
            r"int64 \(\) on task 0 and list\(\[0\]: int64 \(\)\) on task 1",
        ),
    ],
)
def test_different_objects_on_two_tasks(value: Callable[[ComContext], Any], what: str) -> None:
    with pytest.raises(RemoteError, match=rf"AllReduce\('x'\) in step 1: object 'x' is {what}") as caught:
        communicated(AllReduce("x"), value)
    assert isinstance(caught.value.__cause__, MismatchError)


def test_an_object_that_one_task_lacks() -> None:
    def not_task_1(context: ComContext) -> None:
        if context.task_id != 1:
            context.put_obj("x", 1)

    with pytest.raises(
        RemoteError,
        match=r"AllReduce\('x'\) in step 1: object 'x' is int64 \(\) on task 0 and missing on task 1",
    ):
        ComQueue().add(not_task_1).add(AllReduce("x")).exec(THREE)


def test_a_mismatch_that_a_users_function_finds() -> None:
    class SameVersion(CommunicateFunction):
        def communicate(self, context: ComContext, group: TaskGroup) -> None:
            if len(set(group.allgather_object(group.task_id))) > 1:
                raise MismatchError("the tasks have different versions")

    message = r"SameVersion object at .*> in step 1: the tasks have different versions"
    with pytest.raises(RemoteError, match=message):
        ComQueue().add(SameVersion()).exec(THREE)


def test_a_task_that_ends_early_releases_the_others() -> None:
    class OnlySome(CommunicateFunction):
        def communicate(self, context: ComContext, group: TaskGroup) -> None:
            if group.task_id:
                group.allgather_object(None)

    with pytest.raises(RemoteError, match="task 0 has ended"):
        ComQueue().add(OnlySome()).exec(THREE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IterativeComQueue().exec(THREE), "would never end"),
        (lambda: IterativeComQueue().set_max_iter(0), "max_iter=0 is invalid"),
        (lambda: ComQueue().add(cast(Any, 3)), "must be a function of the context, .*not 3"),
        (lambda: ComQueue().add(cast(Any, ComputeFunction)), "pass an object, ComputeFunction"),
        (lambda: AllReduce("x", op=cast(Any, "sum")), "op must be SUM"),
        (lambda: ComQueue().exec("threads:0"), "on='threads:0' is invalid"),
        (lambda: ComQueue().exec("local:"), "on='local:' is invalid"),
        (
            lambda: ComQueue().exec("nowhere:2"),
            "on='nowhere:2': unknown cluster 'nowhere'.*; local:N and threads:N need no cluster",
        ),
        (lambda: ComQueue().add(Broadcast("x", 3)).exec(THREE), "root=3 is not a task: there are 3"),
    ],
)
def test_mistakes_are_errors(build: Callable[[], Any], message: str) -> None:
    with pytest.raises((UsageError, RemoteError), match=message):
        build()
