"""A directory for the sockets and session files of MPI, which vanishes also with a killed process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ronde.process.guard import Guard

__all__ = ["guarded_folder"]


@contextmanager
def guarded_folder() -> Iterator[tuple[Path, Guard]]:
    """Yield a new directory that only this user may enter, and the guard that removes it if this process is killed."""
    folder = tempfile.mkdtemp(prefix="ronde-mpi-")
    guard = Guard(folder)
    try:
        yield Path(folder), guard
    finally:
        guard.close()
        shutil.rmtree(folder, ignore_errors=True)
