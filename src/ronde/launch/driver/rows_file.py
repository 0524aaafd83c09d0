"""Hands the rows that a platform's task gets to the worker that the task starts: by a file of Arrow record batches.

The file has no name, and goes away with the task's process. The worker maps it into its memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

__all__ = ["ROWS", "RowsFile"]

ROWS = "RONDE_TASK_ROWS"  # the variable with the path of the file, which is empty if the task gets no rows


class RowsFile:
    """A file for the rows of a task. `folder`: where (default: that for temporary files). Raises OSError."""

    def __init__(self, folder: str | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - `close` closes it
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
