"""Runs tasks with partitions of a Dask data frame, and hands their rows to the workers of the tasks.

Dask computes the partitions first, on any worker. All tasks get the same number of them, or one less, preferably those
that lie on their own Dask worker. They write them into files. No row passes through the program.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future, get_worker, wait

from ronde.data.columns import holds_numbers
from ronde.data.needs import need
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.clusters.platforms import RowsFile
from ronde.launch.driver.task import run_task

__all__ = ["column_names", "compute_partitions", "numeric_columns", "run_with_rows"]

LOOK_S = 0.5  # between looks whether the partitions are still wanted


def column_names(frame: Any) -> list[Any]:
    """Return the names of the columns of a Dask data frame."""
    return list(frame.columns)


def numeric_columns(frame: Any) -> list[str]:
    """Return the names of the columns of numbers."""
    pandas, pyarrow = need("pandas", extra="dask"), need("pyarrow", extra="data")
    empty = pandas.DataFrame({name: pandas.Series([], dtype=kind) for name, kind in frame.dtypes.items()})
    return [field.name for field in pyarrow.Schema.from_pandas(empty) if holds_numbers(field.type)]


def compute_partitions(
    given: Client, own: Client, frame: Any, tasks: int, is_wanted: Callable[[], bool]
) -> list[Future] | None:
    """Compute the partitions of a frame, at least one for each task; return them as futures of the client `own`.

    Args:
        given: The client of the user, to which futures in the frame may belong.
        own: Another client of the same scheduler.
        frame: The data frame.
        tasks: The number of tasks.
        is_wanted: Returns whether to go on; if not, the result is None.

    Raises:
        Exception: That of the computation.
    """
    if frame.npartitions < tasks:
        frame = frame.repartition(npartitions=tasks)
    parts = given.compute(frame.to_delayed())
    while is_wanted():
        try:
            wait(parts, timeout=LOOK_S)
        except TimeoutError:
            continue
        for part in parts:
            if part.status == "error":
                part.result()
        name = f"ronde-{uuid.uuid4().hex}"
        given.publish_dataset(parts, name=name)  # a client cannot use the futures of another one otherwise
        try:
            found: list[Future] = own.get_dataset(name)
        finally:  # else the cluster would keep the partitions
            given.unpublish_dataset(name)
        return found
    return None


def run_with_rows(ticket: Ticket, parts: Sequence[Any]) -> None:
    """Run a Dask task whose worker gets the rows of partitions, data frames of pandas.

    The worker finds them by `ronde.launch.clusters.platforms.ROWS`.
    """
    import pyarrow

    with RowsFile(get_worker().local_directory) as rows:
        for part in parts:
            if len(part):
                for batch in pyarrow.Table.from_pandas(part, preserve_index=False).to_batches():
                    rows.write(batch)
        run_task(ticket, variables=rows.finish())
