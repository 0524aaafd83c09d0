"""Runs a queue where the user wants it: in processes, threads, tasks of a cluster, or the ranks of the present job."""

from __future__ import annotations

import copy
import itertools
import logging
import mmap
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from ronde.comm.world import has_joined, world
from ronde.comqueue.checkpointing import (
    CheckpointPlace,
    CheckpointRule,
    DriverMemory,
    DriverPlace,
    FolderPlace,
    MemoryPlace,
    latest_step,
)
from ronde.comqueue.partitions import CommonData, LocatedRows, divide_data, load_data
from ronde.comqueue.steps import Plan, StepError, run_plan, with_copied_functions
from ronde.comqueue.task_group import RankGroup, TaskGroup, ThreadGroup, thread_groups
from ronde.data.rows import RowSource
from ronde.engine.process import init
from ronde.environment import environment
from ronde.errors import PeerLostError, RemoteError, UsageError, WorkerError
from ronde.launch.callables import ElasticLaunch
from ronde.launch.calls import describe_unsendable_part, pack_call, pickler
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.process.exceptions import exception_text

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["SharedValues", "run_on"]


_log = logging.getLogger(__name__)

# Sums are formed in the order of tasks, also between hosts.
ORDERED = {"RONDE_ALLREDUCE_ALGORITHM": "direct"}
THREADS_OF_A_PROCESS = "OMP_NUM_THREADS"
# What every task imports. One process does so, the tasks are forked from it, and it waits for the next iteration.
IMPORTS = (__name__, "multiprocessing.spawn", "cloudpickle")

ALIGNMENT = 64  # bytes: of arrays in shared memory

NO_CHECKPOINTS = (
    "A task was lost, and the run has saved no checkpoints: run it again from the first step. To continue after a "
    "loss, pass checkpoint_every to iterate, or call set_checkpoint on the queue (of the fits of ronde.ml, those of "
    "gradient boosting, forests, LatentDirichletAllocation and Word2Vec save checkpoints)."
)

_turns: WeakKeyDictionary[Cluster, threading.Lock] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def run_on(plan: Plan, on: str | Cluster | None) -> list[Any]:
    """Run the plan, and return the results of all tasks. `on` and errors: as of `ComQueue.exec`."""
    if on is None and has_joined():
        return _run_in_job(plan)
    if not isinstance(on, str | None):
        if not hasattr(on, "capacity"):
            raise UsageError(f"on={on!r} is invalid: expected a text such as 'local:2', or a Cluster")
        with _turn_on(on):
            return _run_on_cluster(plan, lambda: on, _capacity(on))
    kind, num_tasks = _parsed(on or "local")
    match kind:
        case "local":
            return _run_in_processes(plan, num_tasks or _cores())
        case "threads":
            return _run_in_threads(plan, num_tasks or _cores())
    from ronde.launch.clusters.cluster import registered_cluster  # only clusters need it

    try:
        cluster = registered_cluster(kind)
    except UsageError as error:
        raise UsageError(f"on={on!r}: {error}; local:N and threads:N need no cluster") from None
    return _run_on_cluster(plan, lambda: registered_cluster(kind), num_tasks or _capacity(cluster))


def _turn_on(cluster: Cluster) -> threading.Lock:
    """Return the lock of a cluster object. Such an object places the tasks of one job at a time."""
    with _turns_lock:
        return _turns.setdefault(cluster, threading.Lock())


def _parsed(on: str) -> tuple[str, int | None]:
    kind, _, number = on.partition(":")
    if kind and (not number or (number.isdecimal() and int(number) > 0)) and not on.endswith(":"):
        return kind, int(number) if number else None
    raise UsageError(
        f"on={on!r} is invalid: expected local:N, threads:N or the name of a cluster with :N, N above 0"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _capacity(cluster: Cluster) -> int:
    capacity = cluster.capacity()
    if capacity is None or capacity.total < 1:
        raise UsageError(
            f"{cluster.name} does not report how many tasks it can run: give their number, as in 'NAME:4'"
        )
    return capacity.total


def _divided(
    plan: Plan, num_tasks: int, is_cluster: bool = False
) -> tuple[CommonData, list[Mapping[str, Any]]]:
    common, parts = divide_data(plan.broadcast, plan.partitioned, num_tasks, plan.rows_per_block)
    if common.openers and not is_cluster:
        (name, *_) = common.openers
        raise UsageError(
            f"the rows of {name!r} are on a cluster: run the tasks there, for example by on='spark'"
        )
    return common, parts


@contextmanager
def _naming_unsendable(common: CommonData, parts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Name the object, and what in it, that keeps the data from being sent to the tasks."""
    try:
        yield
    except UsageError:
        dumps = pickler().dumps
        for name, obj in itertools.chain(common.broadcast.items(), *(part.items() for part in parts)):
            if part := describe_unsendable_part(f"object {name!r}", obj, dumps):
                reason = f"{part.removeprefix('; ')}: create it in the functions that use it"
                raise UsageError(f"object {name!r} cannot be sent to tasks: {reason}") from None
        raise


def _without_data(plan: Plan) -> Plan:
    return replace(plan, partitioned={}, broadcast={})


# The data on the way to the tasks


class TaskValues(Protocol):
    """The data of all tasks: value 0 is the `CommonData`, value i + 1 the parts of task i."""

    def load(self, number: int, *, is_read_only: bool = False) -> Any:
        """Return a value. `is_read_only`: whether its large arrays are."""


@dataclass(frozen=True)
class _Values:
    """Values in this process, or values that are pickled with the function: all of them for each task."""

    values: Sequence[Any]

    def load(self, number: int, *, is_read_only: bool = False) -> Any:
        return self.values[number]


@dataclass(frozen=True)
class _Stored:
    """Where a value lies in the memory: its pickle, and the buffers that this refers to; offsets and lengths."""

    pickled: tuple[int, int]
    buffers: tuple[tuple[int, int], ...]


class SharedValues:
    """Values in memory that processes of this machine share, until the stack of the process that made them closes.

    Each process loads the values that it needs. Large arrays in them are not copied before they are written to, and
    only the process that writes to them sees the change.
    """

    def __init__(self, values: Sequence[Any], stack: ExitStack) -> None:
        fd = os.memfd_create("ronde-data", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        with open(fd, "wb", closefd=False) as file:
            self._stored = [_store(value, file) for value in values]
        self._path = f"/proc/{os.getpid()}/fd/{fd}"

    def load(self, number: int, *, is_read_only: bool = False) -> Any:
        """Return a value, by its number in the sequence. `is_read_only`: whether its large arrays are."""
        stored = self._stored[number]
        access = mmap.ACCESS_READ if is_read_only else mmap.ACCESS_COPY
        with open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = memoryview(mmap.mmap(file.fileno(), size, access=access))

        def at(place: tuple[int, int]) -> memoryview:
            return memory[place[0] : place[0] + place[1]]

        return pickle.loads(at(stored.pickled), buffers=[at(place) for place in stored.buffers])


def _store(value: Any, file: Any) -> _Stored:
    buffers: list[pickle.PickleBuffer] = []
    try:
        packed = pickler().dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        raise UsageError(f"data cannot be sent to tasks: {type(error).__name__}: {error}") from None
    return _Stored(_append(packed, file), tuple(_append(buffer.raw(), file) for buffer in buffers))


def _append(data: Any, file: Any) -> tuple[int, int]:
    file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
    begin = file.tell()
    return begin, file.write(data)


@dataclass(frozen=True)
class _ThreadValues:
    """Values as another process would have them, except sources of rows, which threads share."""

    copies: SharedValues
    sources: Mapping[str, RowSource]

    def load(self, number: int, *, is_read_only: bool = False) -> Any:
        value = self.copies.load(number, is_read_only=is_read_only)
        return value if number else replace(value, sources=self.sources)


# Tasks, by where they run


def _run_task(plan: Plan, values: TaskValues, place: CheckpointPlace | None, group: TaskGroup) -> Any:
    is_read_only = plan.checkpoint is not None
    common = values.load(0)
    parts = values.load(1 + group.task_id, is_read_only=is_read_only)
    data = load_data(common, parts, group, is_read_only)
    checkpoints = None if place is None else place.open(group.task_id)
    return run_plan(plan, common.broadcast, data, group, checkpoints)


def _run_rank(plan: Plan, values: TaskValues, place: CheckpointPlace | None) -> Any:
    """Run a task in a worker."""
    init()
    group = RankGroup(world())
    try:
        return _run_task(plan, values, place, group)
    except SystemExit as error:
        raise StepError(
            f"{_describe_place(group)} exited: {error!r}; to end the iteration, return from it"
        ) from error
    except KeyboardInterrupt as error:
        error.add_note(f"interrupted: {_describe_place(group)}")
        raise


def _describe_place(group: TaskGroup) -> str:
    return f"{group.activity.place} on task {group.task_id}"


def _folder_of(plan: Plan) -> CheckpointPlace | None:
    """Return the folder for checkpoints, if there are to be any."""
    if plan.checkpoint is None:
        return None
    if plan.checkpoint.folder is None:
        raise UsageError(
            "checkpoints need a folder if the ranks of a job are the tasks: pass one that all tasks share"
        )
    return FolderPlace(plan.checkpoint.folder)


def _place_here(plan: Plan, num_tasks: int, stack: ExitStack) -> CheckpointPlace | None:
    """Return where tasks on this machine keep checkpoints: without a folder, in memory until the stack closes."""
    if plan.checkpoint is None or plan.checkpoint.folder is not None:
        return _folder_of(plan)
    return MemoryPlace(num_tasks, stack)


def _run_in_job(plan: Plan) -> list[Any]:
    group = RankGroup(world())
    common, parts = _divided(plan, group.num_tasks)
    parts = [copy.deepcopy(part) if task == group.task_id else {} for task, part in enumerate(parts)]
    values = _Values([replace(common, broadcast=copy.deepcopy(common.broadcast)), *parts])
    place = _folder_of(plan)
    return group.allgather_object(_run_task(with_copied_functions(_without_data(plan)), values, place, group))


def _run_in_processes(plan: Plan, num_tasks: int) -> list[Any]:
    variables = dict(ORDERED)
    if THREADS_OF_A_PROCESS not in environment():  # else each process would use all cores
        variables[THREADS_OF_A_PROCESS] = str(max(1, _cores() // num_tasks))
    with ExitStack() as stack:
        common, parts = _divided(plan, num_tasks)
        with _naming_unsendable(common, parts):
            values = SharedValues([common, *parts], stack)
        place = _place_here(plan, num_tasks, stack)
        worker = WorkerSpec(
            argv=(),
            slots=num_tasks,
            environment=variables,
            preload=IMPORTS,
            keeps_template=threading.current_thread() is threading.main_thread(),
        )
        launch = ElasticLaunch(LaunchConfig(worker), _run_rank, start_method="forkserver")

        def run_once() -> list[Any]:
            results = launch(_without_data(plan), values, place)
            return [results[rank] for rank in range(num_tasks)]

        return _repeat(plan.checkpoint, run_once, lambda: latest_step(place, num_tasks))


def _run_on_cluster(plan: Plan, cluster: Callable[[], Cluster], num_tasks: int) -> list[Any]:
    from ronde.launch.driver.functions import run_packed_call  # only clusters need these
    from ronde.launch.job_options import RunOptions

    common, parts = _divided(plan, num_tasks, is_cluster=True)
    values = _Values([common, *parts])
    rule = plan.checkpoint
    memory = DriverMemory(num_tasks) if rule and rule.folder is None else None
    place = DriverPlace() if memory else _folder_of(plan)
    arguments = (_without_data(plan), values, place)
    options = RunOptions(num_tasks, env=ORDERED)

    def run_once() -> list[Any]:
        where = _placed(plan, cluster())
        with _naming_unsendable(common, parts):
            call = pack_call(_run_rank, arguments, {}, is_same_machine=False)
        return run_packed_call(where, call, options, memory)

    return _repeat(rule, run_once, lambda: memory.latest() if memory else latest_step(place, num_tasks))


def _placed(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the cluster. If rows are on the cluster, its tasks run there. Raises UsageError for several places."""
    located = [data for data in plan.partitioned.values() if isinstance(data, LocatedRows)]
    if len(located) > 1:
        raise UsageError(f"{len(located)} objects have rows that are on the cluster: join them into one")
    for rows in located:
        rows.place(cluster)
    return cluster


def _repeat(
    rule: CheckpointRule | None, run_once: Callable[[], list[Any]], latest: Callable[[], int | None]
) -> list[Any]:
    """Run the tasks, and again as often as the rule allows if one of them was lost.

    `latest`: returns the step of the last checkpoint; 0 if there is none, None if that is not known here.
    """
    for restart in itertools.count(1):
        try:
            return run_once()
        except RemoteError as error:
            is_loss = _is_loss(error)
            if rule is None and is_loss:
                error.add_note(NO_CHECKPOINTS)
            if rule is not None and is_loss and restart > rule.max_restarts:
                error.add_note(_describe_attempts(restart, latest()))
            if rule is None or restart > rule.max_restarts or not is_loss:
                raise
            _log.warning(
                "%s; all tasks start again from their last checkpoint (restart %d of %d)",
                str(error).splitlines()[0],
                restart,
                rule.max_restarts,
            )
    raise AssertionError


def _describe_attempts(attempts: int, step: int | None) -> str:
    times = "once" if attempts == 1 else f"{attempts} times"
    started = f"The tasks have started {times}."
    if step is None:
        return started
    saved = f"The last checkpoint is of step {step}" if step else "There is no checkpoint yet"
    return f"{started} {saved}, so the task was lost in step {step + 1} or later."


def _is_loss(error: RemoteError) -> bool:
    """Return whether a signal killed the task, or a cluster lost it, instead of an exception or an exit.

    A KeyboardInterrupt that a function raised ends its process by SIGINT.
    """
    if not isinstance(error, WorkerError) or error.exit_code == -signal.SIGINT:
        return False
    return error.has_lost_task or error.exit_code < 0


def _run_in_threads(plan: Plan, num_tasks: int) -> list[Any]:
    with ExitStack() as stack:
        place = _place_here(plan, num_tasks, stack)
        common, parts = _divided(plan, num_tasks)
        with _naming_unsendable(common, parts):
            copies = SharedValues([replace(common, sources={}), *parts], stack)
        values = _ThreadValues(copies, common.sources)
        tasks = [_TaskThread(_without_data(plan), values, place, group) for group in thread_groups(num_tasks)]
        for task in tasks:
            task.start()
        try:
            for task in tasks:
                task.join()
        except BaseException:  # such as Ctrl-C
            tasks[0].group.leave()
            raise
    for task in sorted(tasks, key=lambda task: isinstance(task.error, PeerLostError)):
        error = task.error
        if error is None:
            continue
        text = exception_text(error)
        # As SystemExit(3), whose text is "3".
        said = str(error) if isinstance(error, Exception) else f"{error!r} in {task.group.activity.place}"
        raise RemoteError(
            f"task {task.group.task_id} failed: {said}\n\n{text}", task.group.task_id, text
        ) from error
    return [task.result for task in tasks]


class _TaskThread(threading.Thread):
    """A task as a thread, with copies of functions and data, as in a separate process."""

    def __init__(
        self, plan: Plan, values: TaskValues, place: CheckpointPlace | None, group: ThreadGroup
    ) -> None:
        super().__init__(name=f"ronde-task-{group.task_id}", daemon=True)
        self.group = group
        self.result: Any = None
        self.error: BaseException | None = None
        self._plan, self._values, self._place = with_copied_functions(plan), values, place

    def run(self) -> None:
        try:
            self.result = _run_task(self._plan, self._values, self._place, self.group)
        except BaseException as error:
            self.error = error
        finally:
            self.group.leave()
