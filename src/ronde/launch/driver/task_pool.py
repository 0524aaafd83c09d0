"""The tasks that a cluster starts for one driver: they are requested, register, and end.

`launch/driver/task_registry`, or the owner of the pool, decides which tasks take part. The owner starts their agents.
Tasks connect to the driver and stay connected; the driver connects to no task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Cluster, Ticket
from ronde.launch.driver.job_store import tcp_addresses
from ronde.launch.driver.task_registry import (
    Accept,
    Begin,
    Refuse,
    RegistryEffect,
    RegistryEvent,
    Task,
    TaskRegistered,
    TasksMissing,
)
from ronde.launch.driver.task_server import TaskConnection, TaskServer
from ronde.launch.loop import Loop, Order
from ronde.net.event_queue import EventQueue

__all__ = ["PoolOwner", "TaskPool", "agent_name"]


class PoolOwner(Protocol):
    """The driver of the tasks of a pool. The pool calls everything in the thread of the driver's loop."""

    def accept_task(self, task: Task, connection: TaskConnection) -> None:
        """Have the task start its agent, instead of the agent of an earlier attempt."""

    def begin(self, tasks: Sequence[Task]) -> None:
        """Let the job begin: the order of the tasks is that of the ranks."""

    def miss_tasks(self, reason: str, is_final: bool) -> None:
        """End the job, which cannot begin, as `TasksMissing` says."""

    def note_task_end(self, slot: int, reason: str) -> None:
        """Note that the cluster will not try the task of a slot again; see `SlotEvents.slot_ended`."""

    def note_all_ended(self, reason: str) -> None:
        """Note that the cluster has ended all tasks; see `SlotEvents.all_ended`."""


class TaskPool:
    """The tasks of `cluster` for one driver. It listens at once, and serves tasks after `follow`.

    `decide`: answers what happens to the tasks, as `Registry.step` does. `reachable`, `listening`: the addresses of
    this machine, as `reachable_by_tasks` returns them; `port`: 0 for any. The stack closes what this opens.

    Attributes:
        addresses: Where tasks find the driver, for their tickets.
        tasks: The accepted tasks, by the names of their agents.
        has_begun: Whether `PoolOwner.begin` has been called.
        why_all_ended: Why the cluster has ended all tasks; empty if it has not.
        was_loss: Whether the cluster ended them because it lost one.
    """

    def __init__(
        self,
        cluster: Cluster,
        decide: Callable[[RegistryEvent], list[RegistryEffect]],
        key: JobKey,
        silence_ns: int,
        reachable: Sequence[str],
        listening: Sequence[str],
        stack: ExitStack,
        *,
        is_secret: bool = False,
        port: int = 0,
    ) -> None:
        self._cluster, self._decide = cluster, decide
        self._server = TaskServer(listening, key, silence_ns, is_secret, port)
        stack.callback(self._server.close)
        # The slot, None for all, and the reason.
        self._ends: EventQueue[tuple[int | None, str]] = EventQueue()
        stack.callback(self._ends.close)
        self._connections: dict[int, TaskConnection] = {}  # those of which nothing is decided
        self._has_explained = threading.Event()  # the cluster has said why a task of the job ended, or all
        self._is_over = False
        self.addresses = tcp_addresses(reachable, self._server.address)
        self.tasks: dict[str, Task] = {}
        self.has_begun = False
        self.why_all_ended, self.was_loss = "", False

    def follow(self, loop: Loop, owner: PoolOwner, stack: ExitStack) -> None:
        """Serve the tasks in this loop, until the stack closes."""
        self._owner = owner
        for source, serve in ((self._server, self._read_tasks), (self._ends, self._read_ends)):
            loop.watch(source.fileno(), Order.NODES, serve)
            stack.callback(loop.unwatch, source.fileno())

    def request(self, tickets: Sequence[Ticket]) -> None:
        """Request a task for each ticket. Raises UsageError as `Cluster.request`."""
        self._cluster.request(tickets, self)

    def step(self, event: RegistryEvent) -> None:
        """Perform what is decided about the event."""
        for effect in self._decide(event):
            match effect:
                case Accept(task):
                    self.tasks[agent_name(task.slot)] = task
                    self._owner.accept_task(task, self._connections.pop(task.id))
                case Refuse(id, reason):
                    self._connections.pop(id).refuse(reason)
                case Begin(tasks):
                    self.has_begun = True
                    self._owner.begin(tasks)
                case TasksMissing(reason, is_final):
                    self._owner.miss_tasks(reason, is_final)

    def end(self) -> None:
        """Take no more tasks."""
        self._is_over = True

    def await_reason(self, timeout_s: float) -> None:
        """Wait until the cluster has said why a task of the job, or all of them, have ended."""
        self._has_explained.wait(timeout_s)

    # What the cluster reports, in any thread

    def slot_ended(self, slot: int, reason: str) -> None:
        """Note that the task of a slot has ended."""
        if reason and self.has_begun:
            self._has_explained.set()
        self._ends.put((slot, reason))

    def all_ended(self, reason: str, is_loss: bool = False) -> None:
        """Note that all tasks have ended."""
        if not self.why_all_ended:
            self.why_all_ended, self.was_loss = reason, is_loss
        self._has_explained.set()
        self._ends.put((None, reason))

    # In the loop

    def _read_ends(self) -> None:
        for slot, reason in self._ends.take():
            if slot is None:
                self._owner.note_all_ended(reason)
            else:
                self._owner.note_task_end(slot, reason)

    def _read_tasks(self) -> None:
        for connection in self._server.accept():
            if self._is_over:
                connection.refuse("the job is over")
                continue
            about = connection.registration
            self._connections[connection.id] = connection
            task = Task(connection.id, about.slot, about.attempt, about.host, about.host_id, about.gpus)
            self.step(TaskRegistered(task))


def agent_name(slot: int) -> str:
    """Return the name of the agent in a slot."""
    return f"task {slot}"
