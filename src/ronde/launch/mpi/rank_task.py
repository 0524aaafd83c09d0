"""A program: the task of a rank, which an MPI daemon starts. Its agent starts the rank, with MPI's variables.

    python -P -m ronde.launch.mpi.rank_task

The agent of the daemon holds the ticket in a memory file, because what mpirun passes on is readable on its way.
"""

from __future__ import annotations

import pickle
import signal
from dataclasses import replace

from ronde.environment import environment
from ronde.launch.driver.task import run_task
from ronde.launch.mpi.mpi_commands import RANK_VARIABLE, TICKET_VARIABLE

__all__ = ["main"]


def main() -> None:
    """Run the task."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after a failure the driver ends all ranks, and says why
    variables = environment()
    with open(variables[TICKET_VARIABLE], "rb") as file:
        ticket = pickle.load(file)
    run_task(replace(ticket, slot=int(variables[RANK_VARIABLE])))


if __name__ == "__main__":
    main()
