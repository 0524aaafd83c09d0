"""Runs tasks where the rows of a data frame are, and hands these to the workers of the tasks.

A query with `mapInArrow` has as many partitions as there are tasks. Each of its Python workers writes the rows of its
partition into a file, and then runs the task. No row passes through the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark import TaskContext
from pyspark.sql import DataFrame

from ronde.environment import environment
from ronde.launch.clusters.platforms import RowsFile

__all__ = ["run_at_rows"]

FOLDERS = "SPARK_LOCAL_DIRS"  # for temporary data; Spark tells its Python workers


def run_at_rows(frame: DataFrame, tasks: int, run: Callable[[int, Mapping[str, str]], None]) -> int:
    """Call `run(partition, variables)` in a Spark task for each partition, of which there are as many as tasks.

    Partitions are coalesced, or repartitioned if there are too few. Return how many tasks Spark has run: none if it
    finds out before that there are no rows. Raises an exception of Spark if a task fails.
    """

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        context = TaskContext.get()
        assert context is not None
        folder = environment().get(FOLDERS, "").split(",")[0] or None
        with RowsFile(folder) as rows:
            for batch in batches:
                rows.write(batch)
            run(context.partitionId(), rows.finish())
        yield pyarrow.RecordBatch.from_pydict({"task": pyarrow.array([context.partitionId()], "int32")})

    are_enough = frame.rdd.getNumPartitions() >= tasks
    dealt = frame.coalesce(tasks) if are_enough else frame.repartition(tasks)
    return len(dealt.mapInArrow(task, "task int").collect())
