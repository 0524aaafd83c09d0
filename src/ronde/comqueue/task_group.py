"""How the tasks of a queue exchange and combine arrays: as ranks of a job, or as threads of one process.

Arrays are combined in the order of tasks, so both give the same bits. Each task notes what it does, in the words of the
user's program; tasks that make different calls raise an error that quotes two of them.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ronde.comm.communicator import Communicator
from ronde.comm.splits import even_split
from ronde.comqueue.array_tree import layout_of
from ronde.data.rows import Buffers
from ronde.engine.objects import allgather_object, broadcast_object
from ronde.errors import MismatchError, PeerError, PeerLostError, RemoteError, UsageError
from ronde.types import Average, DType, Max, Min, Product, ReduceOp, Sum

__all__ = [
    "Activity",
    "Combine",
    "RankGroup",
    "TaskGroup",
    "ThreadGroup",
    "combine_in_order",
    "compare_activities",
    "find_different",
    "piece_owners",
    "reduce_flat",
    "reduce_leaves",
    "thread_groups",
]


PIECE = 4096  # elements; of a reduction by a function, each piece has an owner

Array = NDArray[Any]
Combine = Callable[[Array, Array], Array]
Given = TypeVar("Given")
Read = TypeVar("Read")


class Activity:
    """The step of a task, the function of the queue that it runs, and the operation that this function called last.

    Attributes:
        operation: The operation, for example "sum"; "" if the function is one of communication.
    """

    def __init__(self) -> None:
        self.operation = ""
        self._function = ""
        self._step_no = 0

    def __str__(self) -> str:
        if not self._step_no:
            return "had not begun step 1"
        if not self._function:
            return f"had ended step {self._step_no}"
        return f"called {self.operation} in {self.place}" if self.operation else f"was in {self.place}"

    @property
    def place(self) -> str:
        """The function and the step."""
        return f"{self._function or 'the end'} in step {self._step_no}" if self._step_no else "the start"

    def begin_function(self, function: str, step_no: int) -> None:
        """Note that the task calls a function of the queue."""
        self._function, self._step_no, self.operation = function, step_no, ""

    def end_function(self) -> None:
        """Note that the last function of the queue has returned."""
        self._function = self.operation = ""


def compare_activities(texts: Sequence[str]) -> str:
    """Return a text about two tasks with different activities; "" if all have the same. `texts`: by task."""
    other = find_different(texts)
    return "" if other is None else f"task 0 {texts[0]}, while task {other} {texts[other]}"


def find_different(texts: Sequence[str]) -> int | None:
    """Return the first task whose text differs from that of task 0; None if there is none."""
    return next((task for task, text in enumerate(texts) if text != texts[0]), None)


class TaskGroup(Protocol):
    """The tasks of a queue, from the view of one of them. All tasks make the same calls in the same order.

    Attributes:
        task_id: The number of this task, from 0.
        num_tasks: The number of tasks.
        tasks_here: The number of tasks on this machine.
        activity: What this task does, for the error if tasks make different calls.
    """

    task_id: int
    num_tasks: int
    tasks_here: int
    activity: Activity

    def allreduce(self, array: Array, op: ReduceOp, out: Array | None = None) -> None:
        """Combine the arrays of all tasks, element by element in the order of tasks, and store the result on each.

        Args:
            array: A C-contiguous array, of the same shape and dtype on all tasks.
            op: `ronde.Sum`, `Max`, `Min`, `Product` or `Average`.
            out: Where the result goes, C-contiguous and of the same shape and dtype (None: into `array`).

        Raises:
            PeerLostError: A task has ended.
        """

    def allgather(self, array: Array) -> Array:
        """Return the arrays of all tasks, concatenated along the first axis in the order of tasks.

        Args:
            array: Of at least one axis; the lengths of the first axis may differ between tasks.

        Raises:
            PeerLostError: A task has ended.
        """

    def alltoall(self, array: Array, splits: Sequence[int]) -> Array:
        """Send part i of the first axis to task i, and return the parts for this task in the order of tasks.

        Args:
            array: Of at least one axis.
            splits: How many rows go to each task. Other tasks may send other numbers of rows.

        Raises:
            PeerLostError: A task has ended.
        """

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return the object of task `root` on all tasks, a copy on the others.

        Args:
            obj: Any object that can be pickled; it counts on task `root` only.
            root: The number of a task.

        Raises:
            PeerLostError: A task has ended.
            RemoteError: The object cannot be pickled.
        """

    def allgather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all tasks, by task.

        Args:
            obj: Any object that can be pickled.

        Raises:
            PeerLostError: A task has ended.
            RemoteError: The object of a task cannot be pickled.
        """


class _GroupCall(NamedTuple):
    """What a task asks of its group. Calls that belong together are equal."""

    operation: str
    op: ReduceOp | None = None
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    root: int | None = None

    def __str__(self) -> str:
        array = "" if self.dtype is None else f" of {self.dtype}"
        shape = "" if self.shape is None else f" {self.shape}"
        by = "" if self.op is None else f" by {self.op.name.lower()}"
        return f"{self.operation}{array}{shape}{by}{'' if self.root is None else f' from task {self.root}'}"


def _compare_calls(activities: Sequence[str], calls: Sequence[str], place: str) -> str:
    """Return a text about two tasks with different activities or, in the same place, different calls; "" if none."""
    if difference := compare_activities(activities):
        return difference
    other = find_different(calls)
    return (
        "" if other is None else f"{place}: task 0 called {calls[0]}, but task {other} called {calls[other]}"
    )


class RankGroup:
    """The ranks of a job as tasks.

    The communicator exchanges arrays, and compares the calls of all ranks; the engine exchanges objects. So before they
    exchange objects, the ranks meet in a call of the communicator. Otherwise one could wait in the engine for another
    that waits in the communicator.
    """

    def __init__(self, world: Communicator) -> None:
        self.task_id, self.num_tasks, self.tasks_here = world.rank, world.size, world.local_size
        self.activity = Activity()
        self._world = world

    def allreduce(self, array: Array, op: ReduceOp, out: Array | None = None) -> None:
        try:
            self._world.allreduce(array, op=op, out=array if out is None else out)
        except MismatchError as error:
            call = _GroupCall("allreduce", op, array.dtype, array.shape)
            raise self._explained(error, call) from None

    def allgather(self, array: Array) -> Array:
        try:
            return self._world.allgather(array)
        except MismatchError as error:
            raise self._explained(error, _GroupCall("allgather", None, array.dtype)) from None

    def alltoall(self, array: Array, splits: Sequence[int]) -> Array:
        try:
            return self._world.alltoall(array, splits)
        except MismatchError as error:
            raise self._explained(error, _GroupCall("alltoall", None, array.dtype)) from None

    def broadcast_object(self, obj: Any, root: int) -> Any:
        self._meet(_GroupCall("broadcast_object", root=root), 2 + root)
        return broadcast_object(obj, root, "comqueue.broadcast")

    def allgather_object(self, obj: Any) -> list[Any]:
        self._meet(_GroupCall("allgather_object"), 1)
        return allgather_object(obj, "comqueue.allgather")

    def _meet(self, call: _GroupCall, number: int) -> None:
        """Return when all tasks have made the same call. `number`: that of the call, which no other one has."""
        try:
            self._world.allreduce(np.zeros((1, number), np.uint8), op=Max)
        except MismatchError as error:
            raise self._explained(error, call) from None

    def _explained(self, error: MismatchError, call: _GroupCall) -> MismatchError:
        """Return an error that tells what two tasks did. All tasks call it, because a mismatch ends all their calls."""
        try:
            gathered = allgather_object((str(self.activity), str(call)), "comqueue.mismatch")
        except (PeerError, RemoteError):  # another one has ended, so only the calls are known
            return MismatchError(f"{self.activity.place}: {error}")
        text = _compare_calls(
            [activity for activity, _ in gathered], [call for _, call in gathered], self.activity.place
        )
        return MismatchError(text or f"{self.activity.place}: {error}")


class _Exchange:
    """The state that the threads of a group share: a value of each task, and a barrier that breaks when a task ends."""

    def __init__(self, num_tasks: int) -> None:
        self.values: list[Any] = [None] * num_tasks
        self._waiting: set[int] = set()
        self._ended: int | None = None
        self._passed = 0  # how often all tasks have come to the barrier
        self._changed = threading.Condition()

    def wait(self, task_id: int) -> None:
        """Wait for all tasks. Raises PeerLostError if one has ended instead."""
        with self._changed:
            self._waiting.add(task_id)
            passed = self._passed
            if len(self._waiting) == len(self.values):
                self._waiting.clear()
                self._passed += 1
                self._changed.notify_all()
            while self._passed == passed:
                if self._ended is not None:
                    raise PeerLostError(f"task {self._ended} has ended", self._ended)
                self._changed.wait()

    def leave(self, task_id: int) -> None:
        """Note that a task has ended, so that others stop waiting for it."""
        with self._changed:
            self._ended = task_id if self._ended is None else self._ended
            self._changed.notify_all()


class ThreadGroup:
    """Threads of one process as tasks; make all groups of a queue with `thread_groups`."""

    def __init__(self, task_id: int, num_tasks: int, exchange: _Exchange) -> None:
        self.task_id, self.num_tasks, self.tasks_here = task_id, num_tasks, num_tasks
        self.activity = Activity()
        self._shared = exchange

    def leave(self) -> None:
        """Let present and later calls of the other tasks raise PeerLostError, unless this task has taken part."""
        self._shared.leave(self.task_id)

    def allreduce(self, array: Array, op: ReduceOp, out: Array | None = None) -> None:
        _check_dtype(array.dtype, op)
        if self.num_tasks == 1 and op in (Sum, Min, Max):
            if out is not None:
                out[...] = array
            return
        call = _GroupCall("allreduce", op, array.dtype, array.shape)
        result = self._exchange(call, array, lambda arrays: combine_in_order(arrays, op))
        (array if out is None else out)[...] = result

    def allgather(self, array: Array) -> Array:
        _check_dtype(array.dtype)
        return self._exchange(_GroupCall("allgather", None, array.dtype), array, np.concatenate)

    def alltoall(self, array: Array, splits: Sequence[int]) -> Array:
        _check_dtype(array.dtype)
        parts = np.split(array, np.cumsum(splits)[:-1])
        call = _GroupCall("alltoall", None, array.dtype)
        return self._exchange(call, parts, lambda sent: np.concatenate([each[self.task_id] for each in sent]))

    def broadcast_object(self, obj: Any, root: int) -> Any:
        return self._exchange(
            _GroupCall("broadcast_object", root=root),
            obj,
            lambda objects: copy.deepcopy(objects[root]) if self.task_id != root else obj,
        )

    def allgather_object(self, obj: Any) -> list[Any]:
        call = _GroupCall("allgather_object")
        return self._exchange(call, obj, lambda objects: [copy.deepcopy(each) for each in objects])

    def _exchange(self, call: _GroupCall, value: Given, read: Callable[[list[Given]], Read]) -> Read:
        """Return what `read` makes of the values of all tasks. No task changes its value before all have read.

        Raises MismatchError on all tasks if another one makes another call.
        """
        if self.num_tasks == 1:
            return read([value])
        shared = self._shared
        shared.values[self.task_id] = (call, value, self.activity)
        shared.wait(self.task_id)
        calls = [each for each, _, _ in shared.values]
        if any(each != calls[0] for each in calls):
            activities = [str(activity) for _, _, activity in shared.values]
            text = _compare_calls(activities, list(map(str, calls)), self.activity.place)
            shared.wait(self.task_id)
            raise MismatchError(text)
        result = read([each for _, each, _ in shared.values])
        shared.wait(self.task_id)
        return result


def thread_groups(num_tasks: int) -> list[ThreadGroup]:
    """Return the groups of the threads that are the tasks of one queue, by task."""
    exchange = _Exchange(num_tasks)
    return [ThreadGroup(task_id, num_tasks, exchange) for task_id in range(num_tasks)]


_COMBINE: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    Sum: np.add,
    Average: np.add,
    Min: np.minimum,
    Max: np.maximum,
    Product: np.multiply,
}


def _check_dtype(dtype: np.dtype[Any], op: ReduceOp | None = None) -> None:
    """Raise UsageError for a dtype that ranks cannot send, or whose values they cannot combine in this way."""
    if dtype.name not in DType.__members__:
        raise UsageError(f"the dtype {dtype} is not supported; convert it to {', '.join(DType.__members__)}")
    if dtype.kind == "c" and op in (Min, Max):
        raise UsageError(f"there is no {op.name.lower()} of {dtype} values")


def combine_in_order(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Return the combination of the arrays, in their order, with the bits that ranks of one host would get.

    As there, 16-bit floats are combined in float32 and rounded once, and averages of integers are truncated.
    Raises UsageError for a reduction that is not of elements.
    """
    if op not in _COMBINE:
        raise UsageError(
            f"{op!r} does not combine the objects of tasks: expected Sum, Average, Min, Max or Product"
        )
    dtype = arrays[0].dtype
    if dtype == np.float16:
        arrays = [each.astype(np.float32) for each in arrays]
    total = functools.reduce(_COMBINE[op], arrays)
    if op is Average:
        divide = np.trunc if dtype.kind in "iu" else np.positive
        total = divide(total / len(arrays))
    return total.astype(dtype, copy=len(arrays) == 1)  # of several it is new


def reduce_leaves(
    group: TaskGroup, leaves: Sequence[Array], op: ReduceOp | Combine, buffers: Buffers
) -> Iterator[Array]:
    """Return combinations of leaves, as new arrays. All tasks have leaves of the same dtypes and shapes."""
    layout = layout_of(leaves)
    flats = [buffers.empty(size, dtype) for size, dtype in zip(layout.sizes, layout.dtypes)]
    if len(leaves) == 1 and leaves[0].flags.c_contiguous:  # no need to copy it
        reduce_flat(group, leaves[0].reshape(-1), op, flats[0])
    else:
        layout.pack(leaves, flats)
        for flat in flats:
            reduce_flat(group, flat, op)
    return layout.parts(flats)


def reduce_flat(group: TaskGroup, array: Array, op: ReduceOp | Combine, out: Array | None = None) -> None:
    """Combine contiguous arrays of one axis. `out`: where the result goes (None: into `array`)."""
    if isinstance(op, ReduceOp):
        group.allreduce(array, op, out)
        return
    if out is not None:
        out[...] = array
    if group.num_tasks > 1:
        _reduce_by_pieces(group, array if out is None else out, op)


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
