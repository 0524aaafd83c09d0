"""The steps of a queue in which tasks exchange objects.

Each step names an object that all tasks have under this name. Before the data, the tasks compare what they have: a
missing object, and another structure, dtype or shape on one task, is the same error on all tasks, and no data moves.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue.array_tree import describe_tree, leaves_of, map_leaves
from ronde.comqueue.context import ComContext
from ronde.comqueue.task_group import TaskGroup, combine_in_order
from ronde.core.splits import even_split
from ronde.errors import MismatchError, UsageError
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
    "piece_owners",
]

SUM, MAX, MIN = Sum, Max, Min
PIECE = 4096  # elements; of a reduction by a function, each piece has an owner
MISSING = "missing"

Array = NDArray[Any]
Combine = Callable[[Array, Array], Array]


class CommunicateFunction(ABC):
    """A step in which all tasks take part. To write one, exchange objects of the context by the group."""

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
        if not isinstance(op, ReduceOp) and not callable(op):
            raise UsageError(f"op must be SUM, MAX, MIN or a function of two arrays, not {op!r}")
        self.name, self.length_name, self.op = name, length_name, op

    def __repr__(self) -> str:
        return f"AllReduce({self.name!r})"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        length = None if self.length_name is None else _length(context, self.name, self.length_name)
        require_same(context, group, self.name, length)
        tree = context.get_obj(self.name)
        if length is not None:
            self._reduce(group, tree[:length])
        elif isinstance(tree, np.ndarray) and tree.flags.c_contiguous and tree.flags.writeable:
            self._reduce(group, tree)
        else:
            context.put_obj(self.name, self._reduce_tree(group, tree))

    def _reduce_tree(self, group: TaskGroup, tree: Any) -> Any:
        """Reduce all leaves of one dtype together."""
        leaves = leaves_of(tree, self.name)
        by_dtype: dict[np.dtype[Any], list[Array]] = {}
        for leaf in leaves:
            by_dtype.setdefault(leaf.dtype, []).append(leaf)
        results = {}
        for dtype, group_of_leaves in by_dtype.items():
            flat = np.concatenate([leaf.reshape(-1) for leaf in group_of_leaves])
            self._reduce(group, flat)
            results[dtype] = iter(np.split(flat, np.cumsum([leaf.size for leaf in group_of_leaves])[:-1]))

        def result_in_place(leaf: Array) -> Array:
            result = next(results[leaf.dtype]).reshape(leaf.shape)
            if not leaf.flags.writeable or not leaf.ndim:
                return result
            leaf[...] = result
            return leaf

        return map_leaves(tree, result_in_place)

    def _reduce(self, group: TaskGroup, array: Array) -> None:
        if isinstance(self.op, ReduceOp):
            group.allreduce(array, self.op)
        elif group.num_tasks > 1:
            _reduce_by_pieces(group, array.reshape(-1), self.op)


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
    """Give every task the object of one task. The others need not have one.

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
    """Let no task go on before all have come here."""

    def __repr__(self) -> str:
        return "Barrier()"

    def communicate(self, context: ComContext, group: TaskGroup) -> None:
        group.allreduce(np.zeros(1, np.uint8), MAX)


def require_same(context: ComContext, group: TaskGroup, name: str, length: int | None = None) -> None:
    """Raise MismatchError on all tasks unless all have an object of that name with the same structure and shapes.

    The tasks compare checksums, and exchange descriptions only if these differ. `length`: compared, too.
    """
    found = describe_tree(context.get_obj(name)) if context.contains_obj(name) else MISSING
    if length is not None:
        found += f", of which {length} elements"
    checksum = zlib.crc32(found.encode())
    extremes = np.array((checksum, -checksum))
    group.allreduce(extremes, MAX)
    if extremes[0] == -extremes[1] and found != MISSING:
        return
    everyone = group.allgather_object(found)
    other = next((task for task, text in enumerate(everyone) if text != everyone[0]), None)
    step = f"in step {context.step_no}"
    if other is None:
        raise UsageError(f"there is no object {name!r} on any task {step}: {context.describe_names()}")
    raise MismatchError(
        f"object {name!r} {step} is {everyone[0]} on task 0 and {everyone[other]} on task {other}: it must have one "
        "structure, dtype and shape on all tasks"
    )


def piece_owners(length: int, num_tasks: int) -> list[int]:
    """Return how many elements each task combines: whole pieces of 4,096, the last one of the array perhaps shorter.

    Of p pieces, task i owns p // n + (i < p % n), in the order of tasks.
    """
    pieces = even_split(-(-length // PIECE), num_tasks)
    ends = [min(sum(pieces[: task + 1]) * PIECE, length) for task in range(num_tasks)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def _reduce_by_pieces(group: TaskGroup, flat: Array, combine: Combine) -> None:
    """Send each piece to its owner, which combines it in the order of tasks and sends the result to all."""
    counts = piece_owners(len(flat), group.num_tasks)
    mine = counts[group.task_id]
    parts = group.alltoall(flat, counts).reshape(group.num_tasks, mine)
    total = parts[0].copy()
    for part in parts[1:]:
        total = np.asarray(combine(total, part))
        if total.shape != part.shape:
            raise UsageError(
                f"the function that combines two arrays of shape {part.shape} returned one of shape {total.shape}: it "
                "must work element by element"
            )
    flat[:] = group.allgather(total.astype(flat.dtype, copy=False))


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
