"""Iterative algorithms over a Flink table: the tasks run where its rows are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clusters.flink_cluster import Flink, flink_cluster, table_environment
from tests.conformance.test_clusters import task_killer

from ronde.comqueue import IterationStep, iterate, read
from ronde.errors import RemoteError, UsageError

pytestmark = [pytest.mark.flink, pytest.mark.slow]
pytest.importorskip("pyflink", reason="PyFlink is not installed here")

ROWS = 30_000
FIRST = 6  # the first of the numbers that the query leaves
NUMBERS = np.arange(FIRST, ROWS + 1, dtype=np.float64)
SOURCE = (
    "CREATE TABLE numbers (n BIGINT, text STRING) WITH ('connector' = 'datagen', 'fields.n.kind' = 'sequence', "
    f"'fields.n.start' = '1', 'fields.n.end' = '{ROWS}')"
)
QUERY = (
    f"SELECT n, CAST(n AS DOUBLE) / 2 AS half, ARRAY[n, 2 * n] AS pair, text FROM numbers WHERE n >= {FIRST}"
)


@pytest.fixture(scope="module")
def flink() -> Iterator[Flink]:
    with flink_cluster() as flink:
        yield flink


@pytest.fixture(scope="module")
def tables(flink: Flink) -> Any:
    """A table environment on the cluster, with a source whose rows the TaskManagers make."""
    tables = table_environment(flink, execution__checkpointing__interval="1 s")
    tables.execute_sql(SOURCE)
    return tables


@pytest.fixture
def cluster(flink: Flink) -> Any:
    from ronde.flink import FlinkCluster

    return FlinkCluster(flink.settings)


def sum_step(c: IterationStep) -> None:
    c.state.sums = c.sum_blocks(lambda rows: {"X": rows.X.sum(axis=0), "y": rows.y.sum()})
    c.state.shares = c.gather(len(c.row_range))


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_tasks_get_the_rows_from_their_task_managers(
    tables: Any, cluster: Any, memory_limit: int | None
) -> None:
    data = read(tables.sql_query(QUERY), {"X": ["n", "pair"], "y": "half"}, memory_limit=memory_limit)
    state = iterate(sum_step, data=data, state={}, max_iter=2, on=cluster).state
    total = NUMBERS.sum()
    assert (state.sums["X"].tolist(), state.sums["y"]) == ([total, total, 2 * total], total / 2)
    assert sum(state.shares) == len(NUMBERS)
    assert min(state.shares) > 0.4 * len(NUMBERS)  # each subtask of the source keeps its half


def test_the_environment_of_the_user_stays_as_it_was(tables: Any, cluster: Any) -> None:
    from ronde.flink.table_rows import environment_of

    java = environment_of(tables.from_path("numbers"))._j_stream_execution_environment
    java.setParallelism(1)
    settings = settings_of(java)
    one = tables.from_elements([(1.0, 2.0), (3.0, 4.0)], ["n", "half"])  # the rows of one subtask
    data = read(one, {"X": ["n"], "y": "half"})
    state = iterate(sum_step, data=data, state={}, max_iter=1, on=cluster).state
    assert (state.sums["y"], sorted(state.shares)) == (6, [0, 2])
    assert settings_of(java) == settings
    assert java.getParallelism() == 1
    assert java.getCheckpointConfig().getCheckpointInterval() == 1000


def settings_of(java: Any) -> dict[str, str]:
    """Return the settings of an environment, without the times at which Flink has planned queries."""
    return {name: value for name, value in java.getConfiguration().toMap().items() if "__" not in name}


def test_the_error_of_unusable_data_names_the_cause(tables: Any, cluster: Any) -> None:
    table = tables.sql_query(QUERY)
    with pytest.raises(UsageError, match=r"the table lacks the columns \['x'\]"):
        read(table, "x")
    with pytest.raises(UsageError, match=r"column 'text' has the type .*: expected numbers or arrays"):
        read(table, "text")
    with pytest.raises(UsageError, match="the rows of 'data' are on a cluster: run the tasks there"):
        iterate(sum_step, data=read(table), state={}, max_iter=1, on="threads:2")
    missing = tables.sql_query("SELECT IF(n = 7, CAST(NULL AS BIGINT), n) AS n FROM numbers")
    with pytest.raises(RemoteError, match=r"'n' in the table on task \d has 1 missing values"):
        iterate(sum_step, data=read(missing, {"X": ["n"], "y": "n"}), state={}, max_iter=1, on=cluster)
    counted = tables.sql_query("SELECT COUNT(n) AS n FROM numbers")
    with pytest.raises(
        RemoteError, match=r"if later rows replace earlier ones, set the runtime mode .* BATCH"
    ):
        iterate(sum_step, data=read(counted, {"X": ["n"], "y": "n"}), state={}, max_iter=1, on=cluster)


def test_a_lost_task_changes_no_bit_of_the_result(tables: Any, cluster: Any, tmp_path: Path) -> None:
    lost, steps, kill_task = tmp_path / "lost", tmp_path / "steps", task_killer()
    data = read(tables.sql_query(QUERY), {"X": ["half"]})

    def step(c: IterationStep) -> None:
        if c.task_id == 1:
            with steps.open("a") as file:
                file.write(f"{c.step_no} ")
        if c.step_no == 7 and c.task_id == 1 and not lost.exists():
            lost.touch()
            kill_task()
            time.sleep(600)
        c.state.total = c.state.total * 0.1 + c.sum_blocks(lambda rows: np.sin(rows.X * c.step_no).sum())

    def total(**options: Any) -> float:
        state = iterate(step, data=data, state={"total": 0.0}, max_iter=20, on=cluster, **options).state
        return float(state.total)

    found = total(checkpoint_every=3)
    # The task may have been lost before the other one had saved what it had after step 6.
    again = steps.read_text().split()[7:]
    assert again in ([*map(str, range(7, 21))], [*map(str, range(4, 21))])
    assert found == total()
