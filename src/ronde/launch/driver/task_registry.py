"""Decides which tasks of a cluster take part in a job, and when the job may begin. Pure.

A cluster starts one task for each slot of the job. A task registers with the driver, which then holds its connection.

Rules

1. A cluster may start the task of a slot again, or twice at once. Of two registrations for a slot the one with the
   higher attempt counts, and of two with the same attempt the first one while its connection lives. The other one is
   refused.
2. Barrier: the job begins when every slot has a task. Tasks that are lost before that leave their slots empty, because
   the cluster may start them again, until it says that it will not.
3. If a slot is still empty at the deadline, the job fails. The reason says how many tasks have registered, and where.
4. After the barrier the set of tasks is final: later registrations are refused, and the driver judges losses.
5. Hosts follow in the order of their lowest slots, and the tasks of a host in the order of theirs. The given first host
   comes before the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Accept",
    "Begin",
    "Refuse",
    "Registry",
    "RegistryEffect",
    "RegistryEvent",
    "StartTimeout",
    "Task",
    "TaskFailed",
    "TaskLost",
    "TaskRegistered",
    "TasksMissing",
    "gpus_by_host",
    "start_order",
]


@dataclass(frozen=True, slots=True)
class Task:
    """A registered task. `id`: of its connection. `host`: for messages; `host_id`: equal for tasks on one host."""

    id: int
    slot: int
    attempt: int
    host: str
    host_id: str
    gpus: tuple[str, ...] = ()


# Events


@dataclass(frozen=True, slots=True)
class TaskRegistered:
    """A task has connected and proved that it belongs to the job."""

    task: Task


@dataclass(frozen=True, slots=True)
class TaskLost:
    """The connection of a task has ended."""

    id: int


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The cluster will not try the task of this slot again, or the task could not start an agent."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartTimeout:
    """The deadline has come."""


RegistryEvent = TaskRegistered | TaskLost | TaskFailed | StartTimeout


# Effects


@dataclass(frozen=True, slots=True)
class Accept:
    """Start the agent of this task; that of an earlier attempt ends now."""

    task: Task


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the task of this connection to end."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """All tasks are there, in the order of their ranks: let the job begin."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class TasksMissing:
    """The job cannot begin. `is_final`: a task has failed; else time is up, and more slots would help."""

    reason: str
    is_final: bool


RegistryEffect = Accept | Refuse | Begin | TasksMissing


@dataclass(slots=True, eq=False)
class Registry:
    """The tasks of one job with a fixed number of slots, from 0 to `slots` - 1."""

    slots: int
    first_host: str = ""
    _tasks: dict[int, Task] = field(default_factory=dict)  # by slot
    _attempts: dict[int, int] = field(default_factory=dict)  # the highest by slot
    _has_begun: bool = False
    _is_over: bool = False

    def step(self, event: RegistryEvent) -> list[RegistryEffect]:
        """Return the effects of the event, in the order in which to carry them out."""
        if self._is_over:
            return [Refuse(event.task.id, "the job is over")] if isinstance(event, TaskRegistered) else []
        match event:
            case TaskRegistered(task):
                return list(self._register(task))
            case TaskLost(id):
                self._tasks = {slot: task for slot, task in self._tasks.items() if task.id != id}
            case TaskFailed(slot, reason) if not self._has_begun:
                return self._give_up(f"task {slot}: {reason}", is_final=True)
            case StartTimeout() if not self._has_begun:
                return self._give_up(self.describe_missing(), is_final=False)
        return []

    def registered(self) -> tuple[Task, ...]:
        """Return the tasks that are there, by slot."""
        return tuple(task for _, task in sorted(self._tasks.items()))

    def describe_missing(self) -> str:
        """Return how many tasks have registered and where, such as "registered 2 of 4 on hosts a, b"."""
        hosts = list(dict.fromkeys(task.host for task in self.registered()))
        where = f" on host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}" if hosts else ""
        return f"registered {len(self._tasks)} of {self.slots}{where}"

    def _register(self, task: Task) -> Iterator[RegistryEffect]:
        if not 0 <= task.slot < self.slots:
            yield Refuse(task.id, f"the job has {self.slots} slots, and no slot {task.slot}")
            return
        if self._has_begun:
            yield Refuse(task.id, "the job has begun with other tasks")
            return
        known, current = self._attempts.get(task.slot, -1), self._tasks.get(task.slot)
        if task.attempt < known:
            yield Refuse(task.id, f"attempt {task.attempt} of slot {task.slot} came after attempt {known}")
            return
        if current and task.attempt == known:
            yield Refuse(
                task.id, f"another task of slot {task.slot}, attempt {known}, runs on {current.host}"
            )
            return
        self._tasks[task.slot], self._attempts[task.slot] = task, task.attempt
        yield Accept(task)
        if len(self._tasks) == self.slots:
            self._has_begun = True
            yield Begin(start_order(self.registered(), self.first_host))

    def _give_up(self, reason: str, *, is_final: bool) -> list[RegistryEffect]:
        self._is_over = True
        return [TasksMissing(reason, is_final)]


def start_order(tasks: Sequence[Task], first_host: str = "") -> tuple[Task, ...]:
    """Return the tasks in the order of their ranks; see rule 5."""
    lowest: dict[str, int] = {}
    for task in tasks:
        lowest[task.host_id] = min(task.slot, lowest.get(task.host_id, task.slot))
    return tuple(
        sorted(
            tasks,
            key=lambda task: (task.host != first_host, lowest[task.host_id], task.host_id, task.slot),
        )
    )


def gpus_by_host(tasks: Sequence[Task]) -> dict[str, tuple[str, ...]]:
    """Return all GPUs of the tasks on each host, by `host_id`, in the order of the tasks."""
    found: dict[str, dict[str, None]] = {}
    for task in tasks:
        found.setdefault(task.host_id, {}).update(dict.fromkeys(task.gpus))
    return {host: tuple(gpus) for host, gpus in found.items()}
