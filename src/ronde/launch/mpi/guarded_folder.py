"""A directory for the sockets, session files and shared memory of MPI. A guard removes it if the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ronde.process.process_groups import Guard

__all__ = ["guarded_folder"]


@contextmanager
def guarded_folder(parent: str | None = None) -> Iterator[tuple[Path, Guard]]:
    """Yield a new directory that only this user may enter, and the guard that removes it if this process is killed.

    Its name contains the id of this process. `parent`: where; None, or if it cannot be written to: among the
    temporary files.
    """
    place = parent if parent is not None and os.access(parent, os.W_OK | os.X_OK) else None
    folder = tempfile.mkdtemp(prefix=f"ronde-mpi-{os.getpid()}-", dir=place)
    guard = Guard(folder)
    try:
        yield Path(folder), guard
    finally:
        guard.close()
        shutil.rmtree(folder, ignore_errors=True)
