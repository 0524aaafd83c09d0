"""Runs tasks where the rows of a data frame are, and hands these to the workers of the tasks.

A query with `mapInArrow` has as many partitions as there are tasks. Each of its Python workers writes the rows of its
partition into a file as Arrow record batches, and then runs the task; the task's worker maps the file into its memory.
The file has no name, and goes away with the Python worker. No row passes through the driver.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from pyspark import TaskContext
from pyspark.sql import DataFrame

from ronde.environment import environment

__all__ = ["ROWS", "run_at_rows"]

ROWS = (
    "RONDE_TASK_ROWS"  # the variable with the path of the file, which is empty for a partition without rows
)
FOLDERS = "SPARK_LOCAL_DIRS"  # for temporary data; Spark tells its Python workers


def run_at_rows(frame: DataFrame, tasks: int, run: Callable[[int, Mapping[str, str]], None]) -> None:
    """Call `run(partition, variables)` in a Spark task for each partition, of which there are as many as tasks.

    Partitions are coalesced, or repartitioned if there are too few. Raises an exception of Spark if a task fails.
    """

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        folder = environment().get(FOLDERS, "").split(",")[0] or None
        with tempfile.TemporaryFile(dir=folder) as file:
            _write(batches, file)
            run(context.partitionId(), {ROWS: f"/proc/{os.getpid()}/fd/{file.fileno()}"})
        yield from ()

    are_enough = frame.rdd.getNumPartitions() >= tasks
    dealt = frame.coalesce(tasks) if are_enough else frame.repartition(tasks)
    dealt.mapInArrow(task, "nothing int").collect()


def _write(batches: Iterator[Any], file: IO[bytes]) -> None:
    """Write record batches as a stream of Arrow's; none: nothing."""
    import pyarrow

    writer = None
    for batch in batches:
        writer = writer or pyarrow.ipc.new_stream(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
    file.flush()
