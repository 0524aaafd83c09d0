"""Which tasks of a cluster take part in a job: attempts, the barrier, the order of ranks."""

from __future__ import annotations

from ronde.launch.driver.task_registry import (
    Accept,
    Begin,
    Refuse,
    Registry,
    RegistryEffect,
    StartTimeout,
    Task,
    TaskFailed,
    TaskLost,
    TaskRegistered,
    TasksMissing,
    start_order,
)


def task(id: int, slot: int, attempt: int = 0, host: str = "a") -> Task:
    return Task(id, slot, attempt, host, host_id=f"{host}'s")


def register(registry: Registry, *tasks: Task) -> list[RegistryEffect]:
    return [effect for each in tasks for effect in registry.step(TaskRegistered(each))]


def test_the_job_begins_when_every_slot_has_a_task() -> None:
    registry = Registry(2)
    first, second = task(10, 1), task(11, 0)
    assert register(registry, first) == [Accept(first)]
    assert register(registry, second) == [Accept(second), Begin((second, first))]
    assert registry.step(StartTimeout()) == []


def test_a_later_attempt_replaces_an_earlier_one_and_a_stale_one_is_refused() -> None:
    registry = Registry(2)
    register(registry, task(1, 0))
    assert register(registry, task(2, 0, attempt=1)) == [Accept(task(2, 0, attempt=1))]
    assert register(registry, task(3, 0)) == [Refuse(3, "attempt 0 of slot 0 came after attempt 1")]
    assert register(registry, task(4, 0, attempt=1, host="b")) == [
        Refuse(4, "another task of slot 0, attempt 1, runs on a")
    ]


def test_a_task_that_is_lost_before_the_job_begins_may_come_again() -> None:
    registry = Registry(2)
    register(registry, task(1, 0), task(2, 1, attempt=1))  # the job has begun
    assert register(registry, task(3, 0, attempt=1)) == [Refuse(3, "the job has begun with other tasks")]
    registry = Registry(2)
    register(registry, task(1, 0))
    assert registry.step(TaskLost(1)) == []
    assert registry.describe_missing() == "registered 0 of 2"
    assert register(registry, task(2, 0, attempt=0)) == [Accept(task(2, 0))]
    assert registry.step(TaskLost(1)) == []  # known already
    assert registry.describe_missing() == "registered 1 of 2 on host a"


def test_at_the_deadline_the_reason_has_numbers_and_hosts() -> None:
    registry = Registry(4)
    register(registry, task(1, 0, host="a"), task(2, 3, host="b"))
    assert registry.step(StartTimeout()) == [TasksMissing("registered 2 of 4 on hosts a, b", is_final=False)]
    assert register(registry, task(3, 1)) == [Refuse(3, "the job is over")]


def test_a_task_that_the_cluster_gives_up_ends_the_job_before_it_begins() -> None:
    registry = Registry(2)
    assert registry.step(TaskFailed(1, "the executor was lost")) == [
        TasksMissing("task 1: the executor was lost", is_final=True)
    ]


def test_a_slot_that_the_job_does_not_have_is_refused() -> None:
    assert register(Registry(2), task(1, 2), task(2, -1)) == [
        Refuse(1, "the job has 2 slots, and no slot 2"),
        Refuse(2, "the job has 2 slots, and no slot -1"),
    ]


def test_ranks_go_by_host_and_the_first_host_can_be_chosen() -> None:
    tasks = [task(0, 0, host="b"), task(1, 1, host="a"), task(2, 2, host="b"), task(3, 3, host="a")]
    assert [each.slot for each in start_order(tasks)] == [0, 2, 1, 3]
    assert [each.slot for each in start_order(tasks, "a")] == [1, 3, 0, 2]


def test_two_containers_of_one_name_are_two_hosts() -> None:
    tasks = [Task(0, 0, 0, "a", "1"), Task(1, 1, 0, "a", "2"), Task(2, 2, 0, "a", "1")]
    assert [each.slot for each in start_order(tasks)] == [0, 2, 1]
