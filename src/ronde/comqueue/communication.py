"""The functions of a queue by which tasks exchange objects.

Each function names an object, which all tasks have under this name. Before they exchange data, the tasks compare their
objects. If one is missing, or has a different structure, dtype or shape, all tasks raise the same error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comm.splits import even_split
from ronde.comqueue.agreement import require_same_structure
from ronde.comqueue.array_tree import Structure, describe_tree, flatten, leaves_of, map_leaves
from ronde.comqueue.buffers import Buffers
from ronde.comqueue.context import ComContext
from ronde.comqueue.reductions import Combine, reduce_flat, reduce_leaves
from ronde.comqueue.task_group import TaskGroup, combine_in_order
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
    "CommunicateFunction",
    "Gather",
    "ReduceScatter",
]

SUM, MAX, MIN = Sum, Max, Min

Array = NDArray[Any]


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
        _check_root(self.root, group)
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
        _check_root(self.root, group)
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


def _check_root(root: int, group: TaskGroup) -> None:
    if not 0 <= root < group.num_tasks:
        raise UsageError(f"root={root} is not a task: there are {group.num_tasks}, counted from 0")
