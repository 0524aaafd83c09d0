"""`iterate`: runs one step function, which computes and communicates. Built on `IterativeComQueue`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue.agreement import (
    checksum_of_state,
    is_checked_after,
    require_same_state,
    require_same_structure,
)
from ronde.comqueue.array_tree import describe_tree, flatten, map_leaves
from ronde.comqueue.block_sums import sum_over_blocks
from ronde.comqueue.functions import (
    MAX,
    MIN,
    SUM,
    ComContext,
    CommunicateFunction,
    check_op,
    check_root,
    name_of,
)
from ronde.comqueue.partitions import RowBlocks, TaskRows, check_same_rows
from ronde.comqueue.queue import IterativeComQueue
from ronde.comqueue.task_group import TaskGroup, ThreadGroup, reduce_leaves
from ronde.data.rows import Buffers
from ronde.errors import UsageError
from ronde.foreign_names import other_names
from ronde.launch.calls import describe_unsendable_part, pickler
from ronde.types import ReduceOp

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["IterationResult", "IterationStep", "iterate"]


DATA, STATE, STOP, ALONE = "data", "state", "stop", "alone"

NOTHING_COMBINED = (
    "{} reads this task's rows, changes the state and combines nothing: it calls no operation in which all tasks take "
    "part. If what it sets depends on the values or the number of these rows, combine it, for example by c.sum"
)

_ALWAYS_SENDABLE = (int, float, complex, str, bytes, np.generic, type(None))

Mapped = TypeVar("Mapped")


@dataclass(frozen=True)
class IterationResult:
    """How an iteration ended.

    Attributes:
        state: The state after the last step, as attributes: `result.state.centers`.
        steps: The number of the last step.
        stopped: Whether `stop_if` ended the iteration; False: it reached `max_iter`.
        outputs: The results of `finish`, by task; empty without `finish`.
    """

    state: SimpleNamespace
    steps: int
    stopped: bool
    outputs: Sequence[Any] = ()


@dataclass
class _Use:
    """What the steps have done so far: whether they have read rows, and called an operation of all tasks."""

    reads_rows: bool = False
    combines: bool = False


class IterationStep:
    """The argument of a step function: data, state, and operations in which all tasks take part.

    All tasks call the same operations in the same order. Each operation takes an array, a number, or a dict, list,
    tuple or dataclass of these, and returns a new one; the argument stays as it is.

    Attributes:
        state: The state as attributes, the same on all tasks, except attributes whose names begin with `_`. Assign to
            them to change the state.
        task_id: The number of this task, from 0.
        num_tasks: The number of tasks.
        step_no: The number of this step, from 1.
    """

    def __init__(
        self, context: ComContext, group: TaskGroup, rows: TaskRows, buffers: Buffers, use: _Use
    ) -> None:
        self.task_id, self.num_tasks, self.step_no = context.task_id, context.num_tasks, context.step_no
        self.state: SimpleNamespace = context.get_obj(STATE)
        self._context, self._group, self._rows, self._buffers, self._use = context, group, rows, buffers, use
        self._operations = 0

    @property
    def data(self) -> Any:
        """The rows of this task; if `iterate` got a dict, its values as attributes."""
        self._use.reads_rows = True
        return self._rows.data

    @property
    def blocks(self) -> RowBlocks:
        """The row blocks of this task, in order: iterate over it. Each block has the form of `data`."""
        self._use.reads_rows = True
        return self._rows.blocks

    @property
    def block_range(self) -> range:
        """The numbers of this task's row blocks among those of all tasks."""
        return self._rows.division.blocks_of(self.task_id)

    @property
    def row_range(self) -> range:
        """The numbers of this task's rows among those of all tasks."""
        return self._rows.division.rows_of(self.task_id)

    @property
    def num_rows(self) -> int:
        """The number of rows of all tasks."""
        return self._rows.division.num_rows

    @property
    def tasks_here(self) -> int:
        """The number of tasks on this machine, which share its cores."""
        return self._group.tasks_here

    @property
    def is_streamed(self) -> bool:
        """Whether rows of this task are not in memory, so that only the operations with blocks read them."""
        return self._rows.is_streamed

    def map_blocks(self, function: Callable[[Any], Mapped]) -> list[Mapped]:
        """Return the results of a function for each row block of this task, in order.

        Args:
            function: Takes a block, which has the form of `data`.

        Raises:
            UsageError: The data have no row blocks: they are partitions without rows.
        """
        return [function(block) for block in self.blocks]

    def sum_blocks(self, function: Callable[[Any], Any]) -> Any:
        """Return the sum of a function over the row blocks of all tasks, with the same bits for any number of tasks.

            gradient = c.sum_blocks(lambda rows: rows.X.T @ (rows.X @ w - rows.y))

        Args:
            function: Takes a block, which has the form of `data`, and returns an array, a number, or a tree of these.
                All its results have the same structure, dtypes and shapes. It may return the same array each time.

        Raises:
            MismatchError: Another task has another structure, dtype or shape.
            PeerLostError: Another task has ended.
            UsageError: As of `map_blocks`; or the results for two blocks differ in structure, dtype or shape.
        """
        self._group.activity.operation = "sum_blocks"
        self._use.combines = True
        # Not `map`, which would end at a StopIteration of the function.
        summands = (function(block) for block in self.blocks)
        return sum_over_blocks(summands, self._rows.division, self._group, self._buffers, name_of(function))

    def sum_by_block(self, summands: Sequence[Any]) -> Any:
        """Return the sum of summands for the row blocks of all tasks, with the bits of `sum_blocks`. Reads no rows.

        Args:
            summands: One for each row block of this task, in order: arrays, numbers, or trees of these. All have the
                same structure, dtypes and shapes.

        Raises:
            MismatchError: Another task has another structure, dtype or shape.
            PeerLostError: Another task has ended.
            UsageError: As of `sum_blocks`; or there are more or fewer summands than row blocks.
        """
        if len(summands) != len(self.block_range):
            raise UsageError(
                f"there are {len(summands)} summands: expected {len(self.block_range)}, one for each row block of task "
                f"{self.task_id}"
            )
        self._group.activity.operation = "sum_by_block"
        self._use.combines = True
        return sum_over_blocks(
            iter(summands), self._rows.division, self._group, self._buffers, "sum_by_block"
        )

    def sum(self, tree: Any) -> Any:
        """Return the sum over all tasks, formed in the order of tasks.

        Args:
            tree: The summand of this task.

        Raises:
            MismatchError: Another task has another structure, dtype or shape.
            PeerLostError: Another task has ended.
        """
        return self._reduce(tree, SUM, "sum")

    def max(self, tree: Any) -> Any:
        """Return the largest values over all tasks, element by element.

        Args:
            tree: The values of this task.

        Raises:
            MismatchError: As of `sum`.
            PeerLostError: As of `sum`.
        """
        return self._reduce(tree, MAX, "max")

    def min(self, tree: Any) -> Any:
        """Return the smallest values over all tasks, element by element.

        Args:
            tree: The values of this task.

        Raises:
            MismatchError: As of `sum`.
            PeerLostError: As of `sum`.
        """
        return self._reduce(tree, MIN, "min")

    def reduce(self, tree: Any, op: ReduceOp | Callable[[Any, Any], Any]) -> Any:
        """Return the combination over all tasks, element by element.

        Args:
            tree: The values of this task.
            op: A `ronde.ReduceOp`, or a function of two arrays that combines them element by element.

        Raises:
            MismatchError: As of `sum`.
            PeerLostError: As of `sum`.
        """
        check_op(op)
        return self._reduce(
            tree, op, f"reduce by {op.name.lower() if isinstance(op, ReduceOp) else name_of(op)}"
        )

    def reduce_in_place(self, array: NDArray[Any], op: ReduceOp = SUM) -> None:
        """Combine an array with those of all tasks, element by element, in the order of tasks.

        For large arrays, and for many calls in one step: unlike `reduce` it makes no new array, and compares structures
        of tasks in the same exchange.

        Args:
            array: C-contiguous, of the same shape and dtype on all tasks. It gets the result.
            op: `ronde.Sum`, `Max` or `Min` (`Sum`).

        Raises:
            MismatchError: As of `sum`.
            PeerLostError: As of `sum`.
        """
        self._begin_operation("reduce_in_place")
        if self.num_tasks > 1:
            self._group.allreduce(array, op)

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all tasks, as a list by task.

        Args:
            obj: Any object that can be pickled.

        Raises:
            PeerLostError: As of `sum`.
        """
        self._begin_operation("gather")
        return self._group.allgather_object(obj)

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of one task.

        Args:
            obj: Any object that can be pickled; only the object of task `root` matters.
            root: The number of the task whose object all tasks get (0).

        Raises:
            PeerLostError: As of `sum`.
        """
        self._begin_operation(f"broadcast from task {root}")
        check_root(root, self._group)
        return self._group.broadcast_object(obj if self.task_id == root else None, root)

    def stop_if(self, condition: Any) -> None:
        """End the iteration after this step if the condition is true on task 0. The value on other tasks has no effect.

        Args:
            condition: Anything with a truth value.

        Raises:
            Exception: The condition has no truth value, for example an array of several elements.
        """
        self._context.put_obj(STOP, bool(condition))

    def _reduce(self, tree: Any, op: ReduceOp | Callable[[Any, Any], Any], operation: str) -> Any:
        name = self._begin_operation(operation)
        leaves, structure = flatten(tree, name)
        if self.num_tasks > 1:
            require_same_structure(self._group, structure, lambda: describe_tree(tree), f"object {name!r} is")
        results = reduce_leaves(self._group, leaves, op, self._buffers)
        return map_leaves(tree, lambda leaf: next(results))

    def _begin_operation(self, operation: str) -> str:
        """Note what all tasks call now. Return a name for its object."""
        self._group.activity.operation = operation
        self._use.combines = True
        self._operations += 1
        return f"operation {self._operations}"


class _StateTypes:
    """Which type each attribute has, and since which step."""

    def __init__(self) -> None:
        self._types: dict[str, tuple[type, int]] = {}

    def note(self, state: Mapping[str, Any], step_no: int) -> None:
        """Note the types after a step; 0: before the first one."""
        for name, value in state.items():
            kind = type(value)
            if name not in self._types or self._types[name][0] is not kind:
                self._types[name] = kind, step_no

    def require_sendable(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError for an attribute that cannot be pickled. Buffers of arrays are not copied."""
        pickles = pickler()
        for name, value in state.items():
            if isinstance(value, _ALWAYS_SENDABLE):
                continue
            try:
                pickles.dumps(value, protocol=5, buffer_callback=lambda buffer: None)
            except Exception as error:
                _, step_no = self._types.get(name, (None, 0))
                since = f"step {step_no} gave it its type; " if step_no else ""
                part = describe_unsendable_part(f"attribute {name!r}", value, pickles.dumps)
                raise UsageError(
                    f"attribute {name!r} of the state cannot be sent to the caller: {type(error).__name__}: {error}"
                    f"{part}; {since}keep it in a variable of the step's module, or delete it in `finish`"
                ) from None


class _StepItem(CommunicateFunction):
    """A user's step function as an item of the queue. `names`: those of the data, if the user passed several."""

    def __init__(
        self, function: Callable[[IterationStep], Any], names: Sequence[str] | None, types: _StateTypes
    ) -> None:
        self._function, self._names, self._types = function, names, types
        self._rows: TaskRows | None = None
        self._buffers, self._use = Buffers(), _Use()

    def __repr__(self) -> str:
        return name_of(self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StepItem:
        return type(self)(copy.deepcopy(self._function, memo), self._names, copy.deepcopy(self._types, memo))

    def communicate(self, context: ComContext, group: TaskGroup) -> Any:
        state = vars(context.get_obj(STATE))
        if self._rows is None:
            self._rows = TaskRows(context, _object_names(self._names))
            self._types.note(state, context.step_no - 1)
        context.put_obj(STOP, False)
        result = self._function(IterationStep(context, group, self._rows, self._buffers, self._use))
        self._types.note(state, context.step_no)
        self._end_step(context, group)
        return result

    def _end_step(self, context: ComContext, group: TaskGroup) -> None:
        context.put_obj(ALONE, self._use.reads_rows and not self._use.combines)
        if is_checked_after(context.step_no):
            place = group.activity.place
            group.activity.end_function()
            require_same_state(group, _state_of(context), place)


class _LastItem(_StepItem):
    """Makes a task's result. The function is the user's `finish`."""

    def __repr__(self) -> str:
        return "the end" if self._function is _end else super().__repr__()

    def communicate(self, context: ComContext, group: TaskGroup) -> Any:
        if not is_checked_after(context.step_no):
            require_same_state(group, _state_of(context), group.activity.place)
        result, is_alone = _result(context), context.get_obj(ALONE)
        output = super().communicate(context, group)
        if result is not None and not isinstance(group, ThreadGroup):
            self._types.require_sendable(vars(result.state))
        return result, is_alone, output

    def _end_step(self, context: ComContext, group: TaskGroup) -> None:
        """Compare no states: at the end each task may change its copy."""


@other_names(cluster="on")
def iterate(
    step: Callable[[IterationStep], Any],
    *,
    data: Any,
    state: Mapping[str, Any],
    max_iter: int,
    on: str | Cluster | None = None,
    checkpoint_every: int | None = None,
    checkpoint_folder: str | None = None,
    max_restarts: int = 3,
    finish: Callable[[IterationStep], Any] | None = None,
    rows_per_block: int = 1,
) -> IterationResult:
    """Call a step function again and again in several tasks, each with some of the rows; return the last state.

        def step(c):                                       # gradient descent
            gradient = c.sum(c.data.X.T @ (c.data.X @ c.state.w - c.data.y))
            c.state.w = c.state.w - 1e-3 * gradient
            c.stop_if(abs(gradient).max() < 1e-6)

        w = iterate(step, data={"X": X, "y": y}, state={"w": zeros}, max_iter=500, on="local:2").state.w

    Args:
        step: Takes an `IterationStep`. Its result has no effect.
        data: Rows, or a dict of several with the same number of rows: arrays, SciPy matrices, data frames, Arrow
            tables, lists, a `RowSource` such as `read` returns, or `Partitions`. Consecutive rows go to each task.
        state: The initial state by name. All tasks have a copy, and must change it in the same way: they compare their
            states after the last step and some earlier ones, without attributes whose names begin with `_`.
        max_iter: The largest number of steps.
        on: Where the tasks run, as of `ComQueue.exec` (None: the ranks of this job, or one process for each core).
        checkpoint_every: The number of steps between two checkpoints, from which the tasks continue when one of them
            was killed (None: no checkpoints). With checkpoints, the data are read-only.
        checkpoint_folder: The folder for checkpoints, as of `IterativeComQueue.set_checkpoint` (None: in the memory of
            this process).
        max_restarts: How often the tasks may start again after one of them was killed.
        finish: Called once on each task after the last step. The attribute `outputs` contains its results (None: no
            call).
        rows_per_block: The least number of rows of a row block, for rows that take less time than the call of a
            function (1). With fewer blocks than tasks, some tasks get no rows.

    Raises:
        RemoteError: The step failed on a task, a task ended, or tasks have different states. The error names task,
            step and function.
        UsageError: An argument is invalid, for example data with different numbers of rows.
    """
    _check_arguments(step, data, state)
    names = tuple(data) if isinstance(data, Mapping) else None
    types = _StateTypes()
    queue = IterativeComQueue().set_max_iter(max_iter).add(_StepItem(step, names, types))
    queue.set_rows_per_block(rows_per_block)
    queue.init_with_broadcast_data(STATE, SimpleNamespace(**state))
    if checkpoint_every is not None:
        queue.set_checkpoint(checkpoint_every, checkpoint_folder, max_restarts)
    partitioned = {DATA: data} if names is None else {f"{DATA}.{name}": data[name] for name in names}
    check_same_rows(partitioned)
    for name, rows in partitioned.items():
        queue.init_with_partitioned_data(name, rows)
    queue.set_compare_criterion_of_node0(_is_stopped).close_with(_LastItem(finish or _end, names, types))
    results = queue.exec(on)
    result: IterationResult = replace(
        results[0][0], outputs=[each for _, _, each in results] if finish else ()
    )
    is_alone = len(results) > 1 and results[0][1]
    if is_alone and checksum_of_state(vars(result.state)) != checksum_of_state(state):
        # At the line of the caller, above `other_names`.
        warnings.warn(NOTHING_COMBINED.format(name_of(step)), RuntimeWarning, stacklevel=3)
    return result


def _check_arguments(step: object, data: object, state: object) -> None:
    if not callable(step):
        raise UsageError(f"step must be a function of an IterationStep, not {step!r}")
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise UsageError(f"state must be a dict of objects by name, such as {{'w': w}}, not {state!r}")
    if isinstance(data, Mapping) and not data:
        raise UsageError("data is an empty dict: expected at least one object with rows")


def _state_of(context: ComContext) -> dict[str, Any]:
    state: SimpleNamespace = context.get_obj(STATE)
    return vars(state)


def _object_names(names: Sequence[str] | None) -> str | dict[str, str]:
    return DATA if names is None else {name: f"{DATA}.{name}" for name in names}


def _end(c: IterationStep) -> None:
    pass


def _is_stopped(context: ComContext) -> bool:
    return bool(context.get_obj(STOP))


def _result(context: ComContext) -> IterationResult | None:
    """Return the result on task 0. (All tasks have the same state.)"""
    if context.task_id:
        return None
    return IterationResult(context.get_obj(STATE), context.step_no, context.get_obj(STOP))
