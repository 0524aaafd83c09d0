"""Runs a queue where the user wants it: in processes, threads, tasks of a cluster, or the ranks of the present job."""

from __future__ import annotations

import copy
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ronde.comm.world import has_joined, world
from ronde.comqueue.partitions import SharedValues, partition
from ronde.comqueue.plan import Plan, run_plan
from ronde.comqueue.task_group import RankGroup, ThreadGroup, thread_groups
from ronde.engine.process import init
from ronde.environment import environment
from ronde.errors import PeerLostError, RemoteError, UsageError
from ronde.launch.callables import run
from ronde.light_dataclasses import replace

if TYPE_CHECKING:
    from ronde.launch.clusters.base import Cluster

__all__ = ["run_on"]

# Sums are formed in the order of tasks, also between hosts.
ORDERED = {"RONDE_ALLREDUCE_ALGORITHM": "direct"}
THREADS_OF_A_PROCESS = "OMP_NUM_THREADS"


def run_on(plan: Plan, on: str | Cluster | None) -> list[Any]:
    """Run the plan, and return the results of all tasks. `on` and errors: as of `ComQueue.exec`."""
    if on is None and has_joined():
        return _run_in_job(plan)
    if not isinstance(on, str | None):
        return _run_on_cluster(plan, on, _capacity(on))
    kind, num_tasks = _parsed(on or "local")
    match kind:
        case "local":
            return _run_in_processes(plan, num_tasks or _cores())
        case "threads":
            return _run_in_threads(plan, num_tasks or _cores())
    from ronde.launch.clusters.registry import registered_cluster  # only clusters need it

    cluster = registered_cluster(kind)
    return _run_on_cluster(plan, cluster, num_tasks or _capacity(cluster))


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
            f"{cluster.name} does not say how many tasks it can run: give their number, as in 'NAME:4'"
        )
    return capacity.total


def _data_of(plan: Plan, num_tasks: int) -> list[Mapping[str, Any]]:
    """Return the objects of each task before the first step."""
    parts = {name: partition(data, num_tasks, name) for name, data in plan.partitioned.items()}
    return [{name: part[task] for name, part in parts.items()} for task in range(num_tasks)]


def _without_data(plan: Plan) -> Plan:
    return replace(plan, partitioned={}, broadcast={})


def _run_in_job(plan: Plan) -> list[Any]:
    group = RankGroup(world())
    mine = _data_of(plan, group.num_tasks)[group.task_id]
    data = copy.deepcopy({**plan.broadcast, **mine})
    result = run_plan(copy.deepcopy(_without_data(plan)), data, group)
    return group.allgather_object(result)


def _run_in_processes(plan: Plan, num_tasks: int) -> list[Any]:
    variables = dict(ORDERED)
    if THREADS_OF_A_PROCESS not in environment():  # else each process would use all cores
        variables[THREADS_OF_A_PROCESS] = str(max(1, _cores() // num_tasks))
    with ExitStack() as stack:
        data = SharedValues([plan.broadcast, *_data_of(plan, num_tasks)], stack)
        return run(_run_rank, (_without_data(plan), data.load), np=num_tasks, environment=variables)


def _run_on_cluster(plan: Plan, cluster: Cluster, num_tasks: int) -> list[Any]:
    data = _SentValues([plan.broadcast, *_data_of(plan, num_tasks)])
    return run(
        _run_rank, (_without_data(plan), data.load), np=num_tasks, environment=ORDERED, cluster=cluster
    )


class _SentValues:
    """Values that travel with the function, all of them to all tasks."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def load(self, number: int) -> Any:
        return self._values[number]


def _run_rank(plan: Plan, load: Callable[[int], Any]) -> Any:
    """Run a task in a worker. `load`: returns the broadcast data for 0, and the partition of task i for i + 1."""
    init()
    group = RankGroup(world())
    return run_plan(plan, {**load(0), **load(1 + group.task_id)}, group)


def _run_in_threads(plan: Plan, num_tasks: int) -> list[Any]:
    with ExitStack() as stack:
        data = SharedValues([plan.broadcast, *_data_of(plan, num_tasks)], stack)
        tasks = [_TaskThread(_without_data(plan), data, group) for group in thread_groups(num_tasks)]
        for task in tasks:
            task.start()
        try:
            for task in tasks:
                task.join()
        except BaseException:  # such as Ctrl-C
            tasks[0].group.leave()
            raise
    failed = [task for task in tasks if task.error is not None]
    for task in sorted(failed, key=lambda task: isinstance(task.error, PeerLostError)):
        error = task.error
        text = "".join(traceback.format_exception(error))
        raise RemoteError(
            f"task {task.group.task_id} failed: {error}\n\n{text}", task.group.task_id, text
        ) from error
    return [task.result for task in tasks]


class _TaskThread(threading.Thread):
    """A task as a thread, with copies of functions and data as another process would have."""

    def __init__(self, plan: Plan, data: SharedValues, group: ThreadGroup) -> None:
        super().__init__(name=f"ronde-task-{group.task_id}", daemon=True)
        self.group = group
        self.result: Any = None
        self.error: BaseException | None = None
        self._plan, self._data = copy.deepcopy(plan), data

    def run(self) -> None:
        try:
            data = {**self._data.load(0), **self._data.load(1 + self.group.task_id)}
            self.result = run_plan(self._plan, data, self.group)
        except BaseException as error:
            self.error = error
        finally:
            self.group.leave()
