"""The launch plan: exactly which processes run, with what in their environment. Pure and printable; nothing is done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ronde.settings import JobKey

__all__ = ["LaunchPlan", "WorkerPlan", "assignments", "plan_local"]

JOB_KEY = "RONDE_JOB_KEY"
HIDDEN = "<hidden>"


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its command, and what it finds in its environment beyond the launcher's own."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # the job key is in it


@dataclass(frozen=True)
class LaunchPlan:
    """All workers of the job, by rank."""

    workers: tuple[WorkerPlan, ...]

    def describe(self) -> str:
        """Return the plan as text that can be shown to anybody: the job key is hidden."""
        count = len(self.workers)
        lines = [
            f"{count} worker{'s' if count > 1 else ''} on this machine",
            "",
            "environment of every worker:",
        ]
        shared = set.intersection(*(set(worker.environment.items()) for worker in self.workers))
        lines += [f"    {text}" for text in assignments(shared)]
        for worker in self.workers:
            lines += ["", f"rank {worker.rank}:"]
            lines += [f"    {text}" for text in assignments(set(worker.environment.items()) - shared)]
            lines += [f"    {shlex.join(worker.argv)}"]
        return "\n".join(lines) + "\n"


def assignments(variables: set[tuple[str, str]]) -> Iterator[str]:
    """Return variables as a shell would set them, sorted; the job key is hidden."""
    for name, value in sorted(variables):
        yield f"{name}={HIDDEN if name == JOB_KEY else shlex.quote(value)}"


def plan_local(
    argv: Sequence[str],
    workers: int,
    *,
    environment: Mapping[str, str],
    cores: int,
    store_address: str,
    job_key: JobKey,
    job_id: str,
    master_port: int,
    columns: int | None = None,
    more: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the plan for `workers` processes of the command `argv` on this machine.

    `environment` is the launcher's own, to see what the user has set; `cores` is how many the workers share;
    `master_port` is free for what the user's rank 0 wants to serve on 127.0.0.1; `columns` is the width of the
    terminal that shows the output, None if there is none. `more` goes into every worker's environment.
    """
    shared = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": job_id,
        "HOROVOD_SIZE": str(workers),
        "HOROVOD_LOCAL_SIZE": str(workers),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "RONDE_STORE": store_address,
        JOB_KEY: job_key.hex(),
    }
    wishes = {
        "OMP_NUM_THREADS": str(max(1, cores // workers)),  # else every worker starts a thread for every core
        "PYTHONUNBUFFERED": "1",  # lines appear when they are printed, and are there after a death
    }
    if columns is not None:
        prefix = len(f"[{workers - 1}] ")
        wishes["COLUMNS"] = str(max(1, columns - prefix))  # so that a progress bar fits
    shared |= {name: value for name, value in wishes.items() if name not in environment}
    shared |= more or {}
    return LaunchPlan(tuple(_plan_worker(rank, argv, shared) for rank in range(workers)))


def _plan_worker(rank: int, argv: Sequence[str], shared: Mapping[str, str]) -> WorkerPlan:
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK")
    own = dict.fromkeys(names, str(rank))
    return WorkerPlan(rank, rank, tuple(argv), {**shared, **own})
