"""Queues of compute and communicate steps: how a user builds and runs them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from ronde.comqueue.checkpointing import CheckpointRule
from ronde.comqueue.execution import run_on
from ronde.comqueue.functions import (
    ComContext,
    CommunicateFunction,
    CompareCriterionFunction,
    CompleteResultFunction,
    ComputeFunction,
    callable_of,
    name_of,
)
from ronde.comqueue.steps import Item, Plan
from ronde.errors import UsageError
from ronde.foreign_names import other_names

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["ComQueue", "IterativeComQueue"]


class ComQueue:
    """One pass over a queue of functions, in several tasks.

        results = (
            ComQueue()
            .init_with_partitioned_data("rows", table)
            .add(lambda context: context.put_obj("sum", context.get_obj("rows").sum(axis=0)))
            .add(AllReduce("sum"))
            .close_with(lambda context: context.get_obj("sum"))
            .exec(on="local:2")
        )

    All methods but `exec` return the queue. Functions get a `ComContext`, the objects of their task.
    """

    def __init__(self) -> None:
        self._plan = Plan()

    def init_with_partitioned_data(self, name: str, data: Any) -> Self:
        """Give each task some rows of the data, as an object that exists before the first step.

        Args:
            name: The object's name.
            data: An array, a SciPy matrix, a data frame, an Arrow table or a list, whose rows are divided in order and
                evenly, in whole row blocks; a `RowSource`; or `Partitions`, one for each task.

        Raises:
            UsageError: There is already data of that name.
        """
        self._check_new(name)
        self._plan.partitioned[name] = data
        return self

    def init_with_broadcast_data(self, name: str, data: Any) -> Self:
        """Give each task a copy of the data, as an object that exists before the first step.

        Args:
            name: The object's name.
            data: Any object that can be pickled.

        Raises:
            UsageError: There is already data of that name.
        """
        self._check_new(name)
        self._plan.broadcast[name] = data
        return self

    def set_rows_per_block(self, rows: int) -> Self:
        """Set how many rows a row block has at least, for rows that take less time than the call of a function.

        Args:
            rows: A whole number above 0. With fewer rows, there is one block.

        Raises:
            UsageError: It is not.
        """
        self._plan.rows_per_block = _whole_number("rows_per_block", rows)
        return self

    def add(self, function: Callable[[ComContext], Any] | ComputeFunction | CommunicateFunction) -> Self:
        """Append a function to the queue.

        Args:
            function: A computation: a function of the context, or a `ComputeFunction`; or a `CommunicateFunction`, such
                as `AllReduce("sums")`. Each task has a copy.

        Raises:
            UsageError: It is none of these.
        """
        self._plan.items.append(_item_of(function, "what add() gets"))
        return self

    def close_with(
        self, function: Callable[[ComContext], Any] | CompleteResultFunction | CommunicateFunction
    ) -> Self:
        """Set the function that makes each task's result after the last step.

        Args:
            function: A function of the context, or a `CompleteResultFunction`; or a `CommunicateFunction`, if
                the tasks exchange objects for the result, which `communicate` then returns.

        Raises:
            UsageError: It is none of these.
        """
        self._plan.complete = _item_of(function, "what close_with() gets")
        return self

    @other_names(cluster="on")
    def exec(self, on: str | Cluster | None = None) -> list[Any]:
        """Run the queue, and return the results of all tasks by task (without `close_with`: None for each).

        You can call it again: each run starts with the original data and with copies of the functions.

        Args:
            on: Where the tasks run: `"local:N"`, N processes of this machine (`"local"`: one for each core);
                `"threads:N"`, threads of this process; `"NAME:N"`, a registered cluster such as `"spark:4"`; or a
                cluster object, on which runs from several threads take turns. None: the ranks of this job, which all
                call this, if `ronde.init()` has been called, else `"local"`.

        Raises:
            RemoteError: A function failed on a task, or a task ended. The error names task, step and function. All
                tasks have ended.
            UsageError: `on`, or what the queue consists of, is invalid.
        """
        if self._plan.max_iter is None and self._plan.criterion is None:
            raise UsageError(
                "the iteration would never end: call set_max_iter() or set_compare_criterion_of_node0() first"
            )
        return run_on(self._plan, on)

    def _check_new(self, name: str) -> None:
        if name in self._plan.partitioned or name in self._plan.broadcast:
            raise UsageError(f"there is already data named {name!r}")


def _item_of(function: object, role: str) -> Item:
    if isinstance(function, CommunicateFunction):
        return Item(repr(function), function)
    return Item(name_of(function), callable_of(function, role))


def _whole_number(name: str, value: object) -> int:
    """Return an argument as an int. Raises UsageError unless it is a whole number above 0; NumPy's count, too."""
    if not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name}={value!r} is invalid: expected a whole number above 0")
    return int(value)


class IterativeComQueue(ComQueue):
    """A queue of functions that runs again and again, until a criterion or a number of steps is reached.

        queue = IterativeComQueue().set_max_iter(20)
        queue.init_with_partitioned_data("points", points).init_with_broadcast_data("centers", start)
        queue.add(assign).add(AllReduce("sums")).add(update)
        queue.close_with(lambda context: context.get_obj("centers"))
        centers = queue.exec(on="local:2")[0]

    At least one of `set_max_iter` and `set_compare_criterion_of_node0` is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plan.max_iter = None

    def set_max_iter(self, max_iter: int) -> Self:
        """Set the largest number of steps.

        Args:
            max_iter: A whole number above 0.

        Raises:
            UsageError: It is not.
        """
        self._plan.max_iter = _whole_number("max_iter", max_iter)
        return self

    def set_compare_criterion_of_node0(
        self, function: Callable[[ComContext], bool] | CompareCriterionFunction
    ) -> Self:
        """Set the criterion that task 0 evaluates after each step: if it is true, all tasks end the iteration.

        Args:
            function: A function of the context, or a `CompareCriterionFunction`.

        Raises:
            UsageError: It is neither.
        """
        self._plan.criterion = Item(name_of(function), callable_of(function, "the criterion"))
        return self

    def set_checkpoint(self, every: int, folder: str | None = None, max_restarts: int = 3) -> Self:
        """Save the objects of all tasks every few steps, and continue from there when a task was killed.

        All tasks start again, and the result has the same bits as without the loss. A checkpoint contains the objects
        that a task has made, and the attributes of functions that are objects, such as a `ComputeFunction`. The
        partitioned data are read-only, and loaded again.

        Args:
            every: The number of steps between two checkpoints.
            folder: A folder on a file system that all tasks share. If you call `exec` again after a failure, it
                continues from the last checkpoint there; at the end it removes the checkpoints. None: in the memory of
                this process, to which the tasks of a cluster send them. The ranks of a job, which `ronde run
                --max-restarts` restarts, need a folder.
            max_restarts: How often `exec` starts the tasks again after a signal killed one of them (3). An exception
                always ends the run, because it would occur again.

        Raises:
            UsageError: A number is out of range.
        """
        self._plan.checkpoint = CheckpointRule(every, folder, max_restarts)
        return self
