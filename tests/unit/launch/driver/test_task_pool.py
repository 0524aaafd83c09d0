"""A pool of tasks: what it tells its owner, with tasks that are sockets of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from tests.unit.launch.driver.test_task_server import PATIENCE_S, SECOND, FakeTask

from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Capabilities, SlotEvents, Ticket
from ronde.launch.driver.driver_messages import TaskMessage
from ronde.launch.driver.task_pool import TaskPool, agent_name
from ronde.launch.driver.task_registry import Registry, StartTimeout, Task
from ronde.launch.driver.task_server import TaskConnection
from ronde.launch.loop import Loop

KEY = JobKey.generate()


class Silent:
    """A cluster that starts no task; the test plays them."""

    name = "silent"
    capabilities = Capabilities(elastic=False, gang=False)

    def capacity(self) -> None:
        """Return None: the slots are not counted."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Start nothing."""

    def cancel(self, reason: str) -> None:
        """End nothing."""


class Owner:
    """Notes what the pool tells it, and accepts tasks."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def accept_task(self, task: Task, connection: TaskConnection) -> None:
        self.told.append(("accept", task.slot))
        connection.accept().close()

    def begin(self, tasks: Sequence[Task]) -> None:
        self.told.append(("begin", *(task.slot for task in tasks)))

    def miss_tasks(self, reason: str, is_final: bool) -> None:
        self.told.append(("missing", reason, is_final))

    def note_task_end(self, slot: int, reason: str) -> None:
        self.told.append(("ended", slot, reason))

    def note_all_ended(self, reason: str) -> None:
        self.told.append(("all ended", reason))


class Job:
    """A pool of two slots, its owner, and the loop that serves it."""

    def __init__(self, stack: ExitStack) -> None:
        self.loop = Loop()
        stack.callback(self.loop.close)
        decide = Registry(2).step
        self.pool = TaskPool(Silent(), decide, KEY, 30 * SECOND, ["127.0.0.1"], ["127.0.0.1"], stack)
        self.owner = Owner()
        self.pool.follow(self.loop, self.owner, stack)
        self.address = self.pool.addresses[0]

    def serve(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, self.owner.told
            self.loop.set_timer(self, time.monotonic_ns() + SECOND // 10, lambda: None)
            self.loop.turn()


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def test_the_job_begins_when_all_tasks_have_registered(job: Job) -> None:
    first, second = FakeTask(job, KEY, slot=1), FakeTask(job, KEY, slot=0)
    job.serve(lambda: job.pool.has_begun)
    assert sorted(job.owner.told[:2]) == [("accept", 0), ("accept", 1)]
    assert job.owner.told[2:] == [("begin", 0, 1)]
    assert set(job.pool.tasks) == {agent_name(0), agent_name(1)}
    for task in (first, second):
        assert task.hear()[0] is TaskMessage.ACCEPT
        task.sock.close()


def test_after_the_end_tasks_are_refused(job: Job) -> None:
    job.pool.end()
    task = FakeTask(job, KEY)
    answer = threading.Thread(target=lambda: answers.append(task.hear()))
    answers: list[tuple[TaskMessage, bytes]] = []
    answer.start()
    job.serve(lambda: bool(answers))
    answer.join()
    assert answers == [(TaskMessage.REFUSE, b"the job is over")]
    assert job.owner.told == []
    assert task.is_closed()


def test_what_is_decided_about_missing_tasks_reaches_the_owner(job: Job) -> None:
    job.pool.step(StartTimeout())
    assert job.owner.told == [("missing", "registered 0 of 2", False)]


def test_the_reports_of_the_cluster_arrive_in_the_loop_and_the_first_reason_counts(job: Job) -> None:
    def report() -> None:
        job.pool.slot_ended(1, "it was lost")
        job.pool.all_ended("cancelled in the UI", is_loss=True)
        job.pool.all_ended("cleaned up")

    thread = threading.Thread(target=report)
    thread.start()
    job.serve(lambda: len(job.owner.told) == 3)
    thread.join()
    assert job.owner.told == [
        ("ended", 1, "it was lost"),
        ("all ended", "cancelled in the UI"),
        ("all ended", "cleaned up"),
    ]
    assert (job.pool.why_all_ended, job.pool.was_loss) == ("cancelled in the UI", True)
    began = time.monotonic()
    job.pool.await_reason(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
