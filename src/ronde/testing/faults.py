"""Injects faults into a rank, given its process id (`Job.pids`)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

__all__ = ["kill", "resume", "stop", "stopped"]


def kill(pid: int) -> None:
    """Kill the process as by `kill -9`: it gets no chance to say goodbye.

    Args:
        pid: the id of the process.

    Raises:
        ProcessLookupError: the process is gone.
    """
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    """Freeze the process (SIGSTOP) until `resume`.

    Args:
        pid: the id of the process.

    Raises:
        ProcessLookupError: the process is gone.
    """
    os.kill(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    """Let a frozen process continue (SIGCONT).

    Args:
        pid: the id of the process.

    Raises:
        ProcessLookupError: the process is gone.
    """
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Freeze the process for the length of a `with` block.

        with faults.stopped(job.pids[1]):
            ...

    Args:
        pid: the id of the process.

    Raises:
        ProcessLookupError: the process is gone.
    """
    stop(pid)
    try:
        yield
    finally:
        resume(pid)
