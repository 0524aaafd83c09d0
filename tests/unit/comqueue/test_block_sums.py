"""Row blocks and sums over them, with tasks as threads; tests/ranks/comqueue has the same in processes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ronde.comqueue import ComContext, IterationStep, IterativeComQueue, Partitions, SumBlocks, iterate
from ronde.errors import RemoteError, UsageError

Array = NDArray[Any]


def rows_of(count: int) -> Array:
    """Return rows whose sum depends on the order of additions."""
    random = np.random.default_rng(count)
    return random.normal(size=(count, 3)) * 10.0 ** random.integers(-8, 9, size=(count, 3))


def sums(block: Array) -> dict[str, Any]:
    return {"sum": block.sum(axis=0), "n": len(block), "square": [float((block**2).sum())]}


def sum_step(c: IterationStep) -> None:
    c.state.found = c.sum_blocks(sums)


def bits_of(found: dict[str, Any]) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in (found["sum"], found["n"], *found["square"])]


@pytest.mark.parametrize("count", [1, 2, 7, 63, 64, 100, 1000])
def test_a_sum_has_the_same_bits_for_any_number_of_tasks(count: int) -> None:
    rows = rows_of(count)

    def found(tasks: int) -> list[bytes]:
        on = f"threads:{tasks}"
        return bits_of(iterate(sum_step, data=rows, state={}, max_iter=1, on=on).state.found)

    expected = found(1)
    assert np.frombuffer(expected[1], np.int64) == count
    assert all(found(tasks) == expected for tasks in (2, 3, 4, 5, 6, 7, 8, 9))


@pytest.mark.parametrize("rows_per_block", [1, 13, 100, 1000])
def test_the_caller_may_ask_for_larger_blocks(rows_per_block: int) -> None:
    rows = rows_of(500)

    def step(c: IterationStep) -> None:
        c.state.sizes = [size for sizes in c.gather(c.map_blocks(len)) for size in sizes]
        sum_step(c)

    def found(tasks: int) -> tuple[list[int], list[bytes]]:
        on = f"threads:{tasks}"
        state = iterate(step, data=rows, state={}, max_iter=1, on=on, rows_per_block=rows_per_block).state
        return state.sizes, bits_of(state.found)

    sizes, bits = found(1)
    assert min(sizes) >= min(rows_per_block, 500 // 64)
    assert len(sizes) == {1: 64, 13: 38, 100: 5, 1000: 1}[rows_per_block]
    assert all(found(tasks) == (sizes, bits) for tasks in (2, 3, 4, 7))


@pytest.mark.parametrize("rows", [0, -1, 2.5])
def test_the_rows_of_a_block_are_a_whole_number(rows: Any) -> None:
    with pytest.raises(
        UsageError, match=f"rows_per_block={rows} is invalid: expected a whole number above 0"
    ):
        iterate(sum_step, data=rows_of(9), state={}, max_iter=1, on="threads:1", rows_per_block=rows)


@pytest.mark.parametrize("size", [1, 3000, 50_000])
def test_a_function_may_fill_the_same_arrays_each_time(size: int) -> None:
    scales = 10.0 ** np.random.default_rng(size).integers(-8, 9, size)

    def step(c: IterationStep) -> None:
        filled = (np.zeros((size, 1)), np.zeros((size, 2), np.float32), np.zeros((), np.int8))

        def fill(block: Array) -> Any:
            for each in filled[:2]:
                each[:] = (block.sum() * scales).reshape(size, -1)
            filled[2][...] = len(block)
            return filled

        c.state.earlier.append(c.sum_blocks(fill))

    def found(tasks: int) -> list[bytes]:
        result = iterate(step, data=rows[:9], state={"earlier": []}, max_iter=2, on=f"threads:{tasks}")
        first, second = ([leaf.tobytes() for leaf in each] for each in result.state.earlier)
        assert first == second
        return first

    rows = rows_of(9)
    expected = found(1)
    assert np.frombuffer(expected[2], np.int8) == 9
    assert all(found(tasks) == expected for tasks in (2, 3, 4, 10))


class Source:
    """Rows that are counted when they are read. The sum over all tasks of `read`: of one process only."""

    def __init__(self, rows: Array, in_memory: bool) -> None:
        self.rows, self.num_rows, self.in_memory = rows, len(rows), in_memory
        self.read: list[int] = []

    def load(self, begin: int, end: int) -> Array:
        self.read.append(end - begin)
        return self.rows[begin:end]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_source_is_read_once_or_block_by_block(in_memory: bool) -> None:
    rows = rows_of(200)
    source = Source(rows, in_memory)
    result = iterate(sum_step, data=source, state={}, max_iter=3, on="threads:2")
    expected = iterate(sum_step, data=rows, state={}, max_iter=1, on="threads:3")
    assert bits_of(result.state.found) == bits_of(expected.state.found)
    assert sum(source.read) == (200 if in_memory else 600)
    assert len(source.read) == (2 if in_memory else 3 * 64)


@pytest.mark.parametrize("tasks", [1, 3])
def test_sums_of_what_is_known_of_each_block_read_nothing(tasks: int) -> None:
    rows = rows_of(200)

    def step(c: IterationStep) -> None:
        if c.step_no == 1:
            c.state._known = c.map_blocks(sums)
        c.state.found = c.sum_by_block(c.state._known)

    source = Source(rows, False)
    result = iterate(step, data=source, state={}, max_iter=3, on=f"threads:{tasks}")
    expected = iterate(sum_step, data=rows, state={}, max_iter=1, on="threads:2")
    assert bits_of(result.state.found) == bits_of(expected.state.found)
    assert sum(source.read) == 200
    with pytest.raises(
        RemoteError, match=r"there are 1 summands: expected \d\d, one for each row block of task \d"
    ):
        iterate(lambda c: c.sum_by_block([0.0]), data=rows, state={}, max_iter=1, on=f"threads:{tasks}")


def test_rows_that_are_not_in_memory_have_no_data() -> None:
    with pytest.raises(
        RemoteError,
        match=r"the data, 200 rows, are not in memory, because .* is False: use `blocks` or `sum_blocks`",
    ):
        iterate(lambda c: c.data, data=Source(rows_of(200), False), state={}, max_iter=1, on="threads:2")


def test_blocks_look_as_the_data_do() -> None:
    def step(c: IterationStep) -> None:
        assert [len(block.x) for block in c.blocks] == [len(block.y) for block in c.blocks]
        assert np.array_equal(np.concatenate([block.x for block in c.blocks]), c.data.x)
        assert c.data.x.tolist() == list(c.row_range)
        assert c.num_rows == 130
        assert len(c.blocks) == len(c.block_range) == len(c.map_blocks(len_of_y))
        c.state.sum = c.sum_blocks(lambda block: block.x @ block.y)

    data = {"x": np.arange(130), "y": [[1]] * 130}
    assert iterate(step, data=data, state={}, max_iter=2, on="threads:3").state.sum.tolist() == [
        sum(range(130))
    ]


def test_an_item_of_a_queue_sums_over_blocks() -> None:
    def moment(context: ComContext, block: Any) -> Array:
        return cast(Array, block.x.T @ block.x * context.step_no + block.n.sum())

    def found(tasks: int) -> list[bytes]:
        queue = IterativeComQueue().init_with_partitioned_data("x", rows_of(99)).set_max_iter(2)
        queue.init_with_partitioned_data("n", np.ones(99)).add(SumBlocks("sum", moment, of=("x", "n")))
        return [
            total.tobytes() for total in queue.close_with(lambda c: c.get_obj("sum")).exec(f"threads:{tasks}")
        ]

    one, two, three = (set(found(tasks)) for tasks in (1, 2, 3))
    assert one == two == three
    assert len(one) == 1


def len_of_y(block: Any) -> int:
    return len(block.y)


def test_the_last_call_sees_the_last_state() -> None:
    def step(c: IterationStep) -> None:
        c.state.scale = c.step_no

    def finish(c: IterationStep) -> Array:
        return np.concatenate([np.zeros(0), *c.map_blocks(lambda rows: rows * c.state.scale + c.sum(0))])

    result = iterate(step, data=np.arange(70), state={}, max_iter=3, on="threads:4", finish=finish)
    assert np.concatenate(result.outputs).tolist() == [3 * row for row in range(70)]
    assert iterate(step, data=[0], state={}, max_iter=1, on="threads:2").outputs == ()


def test_partitions_have_blocks_of_their_own() -> None:
    def step(c: IterationStep) -> None:
        c.state.found = (c.sum_blocks(lambda block: block.sum()), c.num_rows, c.gather(c.block_range))

    parts = Partitions([np.arange(100), np.arange(0), np.arange(3)])
    found = iterate(step, data=parts, state={}, max_iter=1, on="threads:3").state.found
    assert found == (4950 + 3, 103, [range(64), range(64, 64), range(64, 67)])


def test_partitions_without_rows_have_no_blocks() -> None:
    with pytest.raises(RemoteError, match="'data' has no row blocks: its partitions are without rows"):
        iterate(lambda c: c.blocks, data=Partitions([1, 2]), state={}, max_iter=1, on="threads:2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"x": [1, 2, 3], "y": [1, 2]},
            "'data.x' and 'data.y' have 3 and 2 rows: data that are used together",
        ),
        (
            {"x": np.ones(3), "part": Partitions([[1], [2]])},
            r"'data.x' and 'data.part' have 3 and \[1, 1\] rows: data that are used together must have the same",
        ),
        (
            {"x": Partitions([[1, 2], [3]]), "any": Partitions([1, 2]), "y": Partitions([[1], [2, 3]])},
            r"'data.x' and 'data.y' have \[2, 1\] and \[1, 2\] rows: data that are used together",
        ),
    ],
)
def test_different_numbers_of_rows_are_an_error_before_the_first_step(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        iterate(lambda c: c.data, data=data, state={}, max_iter=1, on="threads:2")


def test_different_numbers_of_rows_on_a_task_are_an_error_in_the_first_step() -> None:
    data = {"x": [1, 2, 3], "y": Partitions([[1], [2, 3]])}  # a list is divided into two rows and one
    message = (
        r"failed on task . in step 1: .*'data.x' and 'data.y' have \[2, 1\] and \[1, 2\] rows on the tasks"
    )
    with pytest.raises(RemoteError, match=message):
        iterate(lambda c: c.data, data=data, state={}, max_iter=1, on="threads:2")


def test_the_data_of_a_queue_may_have_different_numbers_of_rows() -> None:
    queue = IterativeComQueue().set_max_iter(1)
    queue.init_with_partitioned_data("x", [1, 2, 3]).init_with_partitioned_data("y", [1, 2])
    queue.close_with(lambda context: (len(context.get_obj("x")), len(context.get_obj("y"))))
    assert queue.exec("threads:2") == [(2, 1), (1, 1)]


def test_data_without_rows_are_an_error() -> None:
    with pytest.raises(UsageError, match="'data' has no rows: expected at least one"):
        iterate(sum_step, data=rows_of(0), state={}, max_iter=1, on="threads:2")


@pytest.mark.parametrize("on", ["threads:1", "threads:2"])
def test_summands_of_another_shape(on: str) -> None:
    def step(c: IterationStep) -> None:
        c.sum_blocks(lambda block: np.zeros(int(block[0]) + 1))

    with pytest.raises(
        RemoteError, match=r"lambda> gives float64 \(1,\) for one block and float64 \(2,\) for another"
    ):
        iterate(step, data=np.arange(4), state={}, max_iter=1, on=on)


@pytest.mark.parametrize("rows_per_block", [1, 100])
def test_summands_that_are_no_arrays(rows_per_block: int) -> None:
    with pytest.raises(RemoteError, match="is of type str: expected an array, a number, or a dict"):
        iterate(
            lambda c: c.sum_blocks(lambda block: "text"),
            data=rows_of(9),
            state={},
            max_iter=1,
            on="threads:1",
            rows_per_block=rows_per_block,
        )


def test_the_sum_of_one_block_is_a_copy() -> None:
    kept = np.zeros(3)

    def step(c: IterationStep) -> None:
        c.state.found = c.sum_blocks(lambda block: (kept, 1))
        kept[:] = 7

    state = iterate(step, data=rows_of(9), state={}, max_iter=1, on="threads:1", rows_per_block=100).state
    np.testing.assert_array_equal(state.found[0], np.zeros(3))
    assert state.found[1] == 1
