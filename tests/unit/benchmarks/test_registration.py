"""The start of a job on a cluster, as the benchmark simulates it: no task's part grows with the number of tasks."""

from __future__ import annotations

import pytest
from registration import Start


@pytest.mark.parametrize("per_host", [1, 4])
def test_each_of_200_tasks_sends_and_gets_few_messages(per_host: int) -> None:
    rows = [Start(tasks, per_host, seed).run() for seed, tasks in enumerate((20, 200))]
    assert [row.tasks for row in rows] == [20, 200]
    assert [row.hosts for row in rows] == [20 // per_host, 200 // per_host]
    few, many = rows
    assert many.task_messages == few.task_messages <= 12
    assert many.task_bytes <= few.task_bytes + 100  # longer numbers
    assert many.task_bytes < 8 << 10
    assert many.probes == 2
    assert many.driver_messages <= 10.5 * few.driver_messages
    assert many.driver_bytes <= 10.5 * few.driver_bytes


def test_ranks_follow_hosts_whatever_the_order_of_arrival() -> None:
    starts = [Start(24, 4, seed) for seed in range(10)]
    for start in starts:
        start.run()
        assert [task.slot for task in start.begun] == list(range(24))
