"""Rows that lie at the tasks of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ronde.comqueue import IterationStep, TaskGroup, iterate, read
from ronde.errors import UsageError
from ronde.launch.clusters.local import LocalCluster


class RowsOfTasks:
    """Each task has as many rows as its number says."""

    def __init__(self) -> None:
        self.places: list[Any] = []

    def place(self, cluster: Any) -> None:
        self.places.append(cluster)

    def opener(self) -> Any:
        return rows_here


def rows_here(group: TaskGroup) -> Any:
    return read(np.arange(100.0 * (1 + group.task_id)))


def sum_step(c: IterationStep) -> None:
    c.state.sum = c.sum_blocks(np.sum)
    c.state.rows = c.gather((len(c.data), c.row_range))


@pytest.mark.slow
def test_tasks_open_what_lies_there() -> None:
    data, cluster = RowsOfTasks(), LocalCluster(2)
    state = iterate(sum_step, data=data, state={}, max_iter=2, on=cluster).state
    assert state.sum == sum(range(100)) + sum(range(200))
    assert state.rows == [(100, range(100)), (200, range(100, 300))]
    assert data.places == [cluster]


def test_one_place_at_a_time_and_on_a_cluster() -> None:
    with pytest.raises(UsageError, match="the rows of 'data' are on a cluster: run the tasks there"):
        iterate(sum_step, data=RowsOfTasks(), state={}, max_iter=1, on="threads:2")
    both = {"x": RowsOfTasks(), "y": RowsOfTasks()}
    with pytest.raises(UsageError, match="2 objects have rows that are on the cluster: join them into one"):
        iterate(sum_step, data=both, state={}, max_iter=1, on=LocalCluster(2))
