"""An MPI daemon that an agent runs instead of workers: its supervision, its directory, and the ticket of its ranks."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ronde.environment import environment
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.driver.driver_messages import DaemonOrder
from ronde.launch.mpi.mpi_commands import PYTHON_VARIABLE, TICKET_VARIABLE
from ronde.net.authentication import Protection
from ronde.process.process_groups import Guard, Process

__all__ = [
    "guarded_folder",
    "run_daemon",
]


READ_BYTES = 4096
IN_MEMORY = "/dev/shm"  # a file system in memory
END_NS = 5 * 10**9  # how long a daemon may take to end its ranks


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


def run_daemon(order: DaemonOrder, job_key: str) -> int:
    """Run the daemon until it ends, or standard input does; return its exit code.

    Its session directory vanishes with it, and the ticket with this process.
    """
    ticket = Ticket(
        slot=0,
        addresses=order.addresses,
        job_key=bytes.fromhex(job_key),
        protection=Protection.SEALED,
        start_timeout_ns=order.start_timeout_ns,
        python=sys.executable,
    )
    fd = os.memfd_create("ronde", os.MFD_CLOEXEC)
    with open(fd, "wb") as file, guarded_folder(IN_MEMORY) as (folder, guard):
        pickle.dump(ticket, file)
        file.flush()
        variables = {
            **environment(),
            **order.environment,
            TICKET_VARIABLE: f"/proc/{os.getpid()}/fd/{fd}",
            PYTHON_VARIABLE: sys.executable,
            "PRTE_MCA_prte_tmpdir_base": str(folder),  # Open MPI 5
            "OMPI_MCA_orte_tmpdir_base": str(folder),  # Open MPI 4
            "OMPI_MCA_btl_sm_backing_directory": str(folder),  # a killed rank leaves its shared memory there
            "OMPI_MCA_btl_vader_backing_directory": str(folder),  # Open MPI 4
        }
        daemon = Process(["/bin/sh", "-c", order.command], variables, stdout=1, stderr=2)
        guard.add(daemon.pid)
        if not _wait(daemon.pidfd):
            daemon.signal_group(signal.SIGTERM)
            select.select([daemon.pidfd], [], [], END_NS / 1e9)
            daemon.signal_group(signal.SIGKILL)
            select.select([daemon.pidfd], [], [])
        code = daemon.reap()
        for pidfd in daemon.open_group():
            os.close(pidfd)
            daemon.signal_group(signal.SIGKILL)
        return code if code >= 0 else 128 - code


def _wait(pidfd: int) -> bool:
    """Wait for the end of the daemon or of standard input; return whether the daemon has ended."""
    while True:
        ready, _, _ = select.select([pidfd, 0], [], [])
        if pidfd in ready:
            return True
        if not os.read(0, READ_BYTES):
            return False
