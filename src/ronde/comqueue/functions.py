"""The functions of a queue: what they see of their task, which kinds there are, and how they exchange objects.

Each function gets a `ComContext`: the numbers of task and step, and the task's named objects. Any callable that takes
it is a computation. A `CommunicateFunction` names an object, which all tasks have under this name. Before they exchange
data, the tasks compare their objects. If one is missing, or has a different structure, dtype or shape, all tasks raise
the same error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comm.splits import even_split
from ronde.comqueue.agreement import require_same_structure
from ronde.comqueue.array_tree import Structure, describe_tree, flatten, leaves_of, map_leaves
from ronde.comqueue.row_blocks import RowDivision
from ronde.comqueue.task_group import Combine, TaskGroup, combine_in_order, reduce_flat, reduce_leaves
from ronde.data.rows import Buffers
from ronde.errors import UsageError
from ronde.types import Max, Min, ReduceOp, Sum

__all__ = [
    "MAX",
    "MIN",
    "SUM",
    "AllGather",
    "AllReduce",
    "Barrier",
    "Broadcast",
    "ComContext",
    "CommunicateFunction",
    "CompareCriterionFunction",
    "CompleteResultFunction",
    "ComputeFunction",
    "Gather",
    "ReduceScatter",
    "callable_of",
    "check_op",
    "check_root",
    "name_of",
]


SUM, MAX, MIN = Sum, Max, Min

Array = NDArray[Any]


class ComContext:
    """One task's view of a running queue. Each function of the queue gets it as its argument.

    Objects belong to one task of one `exec`. Other tasks and other runs do not see them, even as threads of one
    process.

    Attributes:
        task_id: The number of this task, from 0.
        num_tasks: The number of tasks.
        step_no: The number of the current step, from 1.
        divisions: How rows are divided among tasks, by the name of the data.
    """

    def __init__(
        self,
        task_id: int,
        num_tasks: int,
        objects: dict[str, Any] | None = None,
        divisions: Mapping[str, RowDivision] | None = None,
    ) -> None:
        self.task_id = task_id
        self.num_tasks = num_tasks
        self.step_no = 1
        self._objects = {} if objects is None else objects
        self.divisions = {} if divisions is None else divisions

    def __repr__(self) -> str:
        return f"<ComContext: task {self.task_id} of {self.num_tasks}, step {self.step_no}>"

    def put_obj(self, name: str, obj: Any) -> None:
        """Store an object under a name, and replace an earlier object of this name.

        Args:
            name: Its name.
            obj: Any object. Communicate functions work on arrays, numbers, and trees of these.

        Raises:
            UsageError: The name is not a `str`.
        """
        if not isinstance(name, str):
            raise UsageError(f"the name of an object must be a str, not {name!r}")
        self._objects[name] = obj

    def get_obj(self, name: str) -> Any:
        """Return the object of that name.

        Args:
            name: Its name.

        Raises:
            UsageError: There is none. The error lists the names that exist, the task and the step.
        """
        try:
            return self._objects[name]
        except KeyError:
            raise UsageError(
                f"there is no object {name!r} {self.describe_place()}: {self.describe_names()}"
            ) from None

    def remove_obj(self, name: str) -> Any:
        """Remove the object of that name, and return it.

        Args:
            name: Its name.

        Raises:
            UsageError: There is none.
        """
        obj = self.get_obj(name)
        del self._objects[name]
        return obj

    def contains_obj(self, name: str) -> bool:
        """Return whether there is an object of that name. Raises nothing.

        Args:
            name: Its name.
        """
        return name in self._objects

    def describe_place(self) -> str:
        """Return task and step, for messages. Raises nothing."""
        return f"on task {self.task_id} in step {self.step_no}"

    def describe_names(self) -> str:
        """Return which objects there are, for messages. Raises nothing."""
        return f"the task has {', '.join(map(repr, sorted(self._objects))) or 'none'}"


class ComputeFunction(ABC):
    """A computation on the objects of one task. Each task has a copy, which may keep state of this task."""

    @abstractmethod
    def calc(self, context: ComContext) -> None:
        """Compute one step.

        Args:
            context: The task's objects.

        Raises:
            Exception: Any exception ends all tasks. `exec` then raises RemoteError with task, step and function.
        """


class CompareCriterionFunction(ABC):
    """Decides after each step, on task 0, whether the iteration ends."""

    @abstractmethod
    def calc(self, context: ComContext) -> bool:
        """Return whether this step was the last one.

        Args:
            context: The objects of task 0.

        Raises:
            Exception: As of `ComputeFunction.calc`.
        """


class CompleteResultFunction(ABC):
    """Makes the result of each task after the last step."""

    @abstractmethod
    def calc(self, context: ComContext) -> Any:
        """Return the result of this task.

        Args:
            context: The objects of this task, with the number of the last step.

        Raises:
            Exception: As of `ComputeFunction.calc`.
        """


def callable_of(function: object, role: str) -> Callable[[ComContext], Any]:
    """Return the callable: the function, or the method `calc` of an object. `role`: for the error.

    Raises UsageError if it is neither, for example a class instead of an object.
    """
    if isinstance(function, type):
        raise UsageError(
            f"{role} is the class {function.__qualname__}: pass an object, {function.__qualname__}(...)"
        )
    if isinstance(function, (ComputeFunction, CompareCriterionFunction, CompleteResultFunction)):
        return function.calc
    if callable(function):
        return function
    raise UsageError(
        f"{role} must be a function of the context, or an object with a method calc, not {function!r}"
    )


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of an object, for messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


# Functions that communicate


class CommunicateFunction(ABC):
    """A function by which tasks exchange objects. To write one, derive from this class and use the group."""

    @abstractmethod
    def communicate(self, context: ComContext, group: TaskGroup) -> Any:
        """Exchange objects with the other tasks. What it returns counts only if the queue is closed with it.

        Args:
            context: The objects of this task.
            group: The tasks; all of them make the same calls in the same order.

        Raises:
            MismatchError: Tasks have different objects of one name.
            PeerLostError: Another task has ended.
        """


class AllReduce(CommunicateFunction):
    """Combine an object of all tasks, element by element; every task gets the result in its place.

        AllReduce("sums")                   # an array, a number, or a tree of both
        AllReduce("buffer", "used")         # only the first `used` elements, a number that the tasks have in common

    Arrays receive the result in place; numbers are replaced. Elements are combined in the order of tasks, so that all
    tasks get the same bits in every run.

    Args:
        name: The object's name.
        length_name: The name of a number: how many elements of the object, an array, take part (None: all).
        op: `SUM`, `MAX`, `MIN`, another `ronde.ReduceOp` of elements, or a function of two arrays that returns their
            combination, element by element.
    """

    def __init__(self, name: str, length_name: str | None = None, op: ReduceOp | Combine = SUM) -> None:
        check_op(op)
        self.name, self.length_name, self.op = name, length_name, op

    def __repr__(self) -> str:
        return f"AllReduce({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        length = None if self.length_name is None else _length(context, self.name, self.length_name)
        require_same(context, group, self.name, length)
        tree = context.get_obj(self.name)
        if length is not None:
            reduce_flat(group, tree[:length], self.op)
        elif isinstance(tree, np.ndarray) and tree.flags.c_contiguous and tree.flags.writeable:
            reduce_flat(group, tree.reshape(-1), self.op)
        else:
            results = iter(reduce_leaves(group, leaves_of(tree, self.name), self.op, Buffers()))
            context.put_obj(self.name, map_leaves(tree, lambda leaf: _in_place(leaf, next(results))))


def _in_place(leaf: Array, result: Array) -> Array:
    if not leaf.flags.writeable or not leaf.ndim:
        return result
    leaf[...] = result
    return leaf


class ReduceScatter(CommunicateFunction):
    """Sum an array of all tasks; each task gets its share of the first axis, as `numpy.array_split` cuts it.

    Args:
        name: The object's name. The share takes the array's place.
        op: As of `AllReduce`, but no function.
    """

    def __init__(self, name: str, op: ReduceOp = SUM) -> None:
        self.name, self.op = name, op

    def __repr__(self) -> str:
        return f"ReduceScatter({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        require_same(context, group, self.name)
        array = context.get_obj(self.name)
        if not isinstance(array, np.ndarray) or not array.ndim:
            raise UsageError(
                f"object {self.name!r} is {describe_tree(array)}: expected an array of at least one axis"
            )
        parts = group.alltoall(array, even_split(len(array), group.num_tasks))
        parts = parts.reshape(group.num_tasks, -1, *array.shape[1:])
        context.put_obj(self.name, combine_in_order(list(parts), self.op))


class Broadcast(CommunicateFunction):
    """Give every task the object of one task. The other tasks need not have this object.

    Args:
        name: The object's name. It may be any object that can be pickled.
        root: The number of the task whose object all get (0).
    """

    def __init__(self, name: str, root: int = 0) -> None:
        self.name, self.root = name, root

    def __repr__(self) -> str:
        return f"Broadcast({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        check_root(self.root, group)
        mine = context.get_obj(self.name) if group.task_id == self.root else None
        context.put_obj(self.name, group.broadcast_object(mine, self.root))


class AllGather(CommunicateFunction):
    """Give every task the objects of all tasks, as a list by task.

    Args:
        name: The object's name. It may be any object that can be pickled; the list takes its place.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"AllGather({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        context.put_obj(self.name, group.allgather_object(context.get_obj(self.name)))


class Gather(CommunicateFunction):
    """Give one task the objects of all tasks, as a list by task. The other tasks keep theirs.

    Args:
        name: The object's name. It may be any object that can be pickled.
        root: The number of the task that gets the list (0).
    """

    def __init__(self, name: str, root: int = 0) -> None:
        self.name, self.root = name, root

    def __repr__(self) -> str:
        return f"Gather({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        check_root(self.root, group)
        mine = context.get_obj(self.name)
        everyone = group.allgather_object(mine)
        if group.task_id == self.root:
            context.put_obj(self.name, everyone)


class Barrier(CommunicateFunction):
    """Wait until all tasks have called this."""

    def __repr__(self) -> str:
        return "Barrier()"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        group.allreduce(np.zeros(1, np.uint8), MAX)


def check_op(op: object) -> None:
    """Raise UsageError if it is neither a reduction nor a function."""
    if not isinstance(op, ReduceOp) and not callable(op):
        raise UsageError(f"op must be SUM, MAX, MIN or a function of two arrays, not {op!r}")


def require_same(context: ComContext, group: TaskGroup, name: str, length: int | None = None) -> None:
    """Raise MismatchError on all tasks unless all have an object of that name with the same structure and shapes.

    `length`: compared, too.
    """
    structure: Structure = ("missing",)
    if context.contains_obj(name):
        _, structure = flatten(context.get_obj(name), name)

    def describe() -> str:
        found = describe_tree(context.get_obj(name)) if context.contains_obj(name) else "missing"
        return found if length is None else f"{found}, of which {length} elements"

    require_same_structure(group, (*structure, length), describe, f"object {name!r} is")
    if not context.contains_obj(name):
        raise UsageError(f"there is no object {name!r} on any task: {context.describe_names()}")


def _length(context: ComContext, name: str, length_name: str) -> int:
    length, array = context.get_obj(length_name), context.get_obj(name)
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise UsageError(
            f"object {name!r} is {describe_tree(array)}: with a length it must be an array of one axis"
        )
    if not 0 <= int(length) <= len(array):
        raise UsageError(
            f"the length {length_name!r} is {length} {context.describe_place()}, but {name!r} has {len(array)} elements"
        )
    return int(length)


def check_root(root: int, group: TaskGroup) -> None:
    """Raise UsageError if there is no such task."""
    if not 0 <= root < group.num_tasks:
        raise UsageError(f"root={root} is not a task: there are {group.num_tasks}, counted from 0")
