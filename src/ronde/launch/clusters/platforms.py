"""What the clusters of Spark, Ray, Dask and Flink share.

They say how to install their package, warn of a platform that sends the job's key in the clear, deal the partitions of
a data frame to slots, and hand the rows of a task to its worker.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from ronde.errors import UsageError

__all__ = ["ROWS", "RowsFile", "deal_partitions", "needs_package", "report_unencrypted"]

_log = logging.getLogger(__name__)
ROWS = "RONDE_TASK_ROWS"  # the variable with the path of the file, which is empty if the task gets no rows


@contextmanager
def needs_package(package: str, extra: str) -> Iterator[None]:
    """Let a failure to import the package, inside a `with` block, say how to install it: with this extra of Ronde."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"ronde.{extra} needs {package}, which is not installed: run pip install 'ronde[{extra}]' here and where "
            "the tasks run",
            name=package,
        ) from None


def report_unencrypted(platform: str, remedy: str, is_refused: bool) -> None:
    """Warn that the platform sends the key in the clear, with the way to change that; raise UsageError instead if so.

    `is_refused`: whether the caller allows encrypted connections only.
    """
    text = (
        f"{platform} sends its tasks unencrypted, and the job's key with them, so anybody who reads the network can "
        f"join the job: {remedy}"
    )
    if is_refused:
        raise UsageError(text)
    _log.warning("%s", text)


def deal_partitions(holders: Sequence[Collection[str]], places: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the partitions of each slot, in ascending order.

    All slots get the same number of partitions, or one less, preferably those that their workers hold. Raises nothing.

    Args:
        holders: For each partition the workers that hold it.
        places: For each slot its worker; "" if that is not known.
    """
    share, longer = divmod(len(holders), len(places))
    dealt: list[list[int]] = [[] for _ in places]
    room = [share + (slot < longer) for slot in range(len(places))]
    elsewhere = []
    for number, workers in enumerate(holders):
        slot = next((slot for slot, place in enumerate(places) if place in workers and room[slot]), None)
        if slot is None:
            elsewhere.append(number)
        else:
            dealt[slot].append(number)
            room[slot] -= 1
    for number in elsewhere:
        slot = max(range(len(places)), key=room.__getitem__)
        dealt[slot].append(number)
        room[slot] -= 1
    return [sorted(numbers) for numbers in dealt]


class RowsFile:
    """A file for the rows of a task. `folder`: where (default: that for temporary files). Raises OSError."""

    def __init__(self, folder: str | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `close` closes it
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, batch: Any) -> None:
        """Append a record batch; all have one schema. Raises OSError."""
        if self._writer is None:
            import pyarrow

            self._writer = pyarrow.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def finish(self) -> Mapping[str, str]:
        """Return the variables by which a worker finds the rows. No more may be written. Raises OSError."""
        if self._writer is not None:
            self._writer.close()
        self._file.flush()
        return {ROWS: f"/proc/{os.getpid()}/fd/{self._file.fileno()}"}

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
