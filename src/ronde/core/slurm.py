"""Reads the task and step from Slurm's variables. Pure.

Slurm sets most of its variables in batch scripts too, where no task has been started: only a step has an id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from ronde.core import node_list
from ronde.errors import UsageError
from ronde.light_dataclasses import dataclass

__all__ = ["Step", "find_step"]

# Below the ports that systems give to outgoing connections, above those of well-known services.
FIRST_PORT, PORTS = 12_000, 20_000


@dataclass(frozen=True)
class Step:
    """One task's view of its step.

    `job` names the step: the same text for all its tasks, another one for any other step; empty if Slurm does not say.
    `task` counts from 0 to `tasks` - 1; `size_name` is the variable with their number. `hosts` is the list of hosts as
    Slurm writes it, `tasks_here` how many of the tasks are on this host. `cpus` and `gpus` are this task's share.
    """

    job: str
    task: int
    tasks: int
    size_name: str
    hosts: str
    is_one_host: bool
    tasks_here: int
    cpus: int
    gpus: int

    @property
    def workers(self) -> int:
        """How many workers a task has room for: one for each GPU, or else for each processor."""
        return self.gpus or self.cpus

    def name(self, uid: int) -> str:
        """Return the name of the job of this user."""
        return f"{self.job} of user {uid}"

    def endpoint(self) -> tuple[str, int]:
        """Return a host and port where the tasks can meet: the first host, at a port that follows from the step.

        Raises UsageError if the list of hosts is malformed.
        """
        if not self.hosts:
            raise UsageError(
                "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set, although Slurm's other variables are: say "
                "--rdzv-endpoint HOST:PORT"
            )
        number = int(hashlib.sha256(self.job.encode()).hexdigest(), 16)
        return node_list.expand(self.hosts)[0], FIRST_PORT + number % PORTS


def find_step(environ: Mapping[str, str]) -> Step | None:
    """Return the step of which this process is a task, or None outside of a step. Raises UsageError."""
    step = environ.get("SLURM_STEP_ID")
    if not step or not environ.get("SLURM_PROCID"):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    tasks = _number(environ, size_name)
    if tasks < 1:
        raise UsageError(f"{size_name}={tasks} is invalid: expected at least 1 rank")
    task = _number(environ, "SLURM_PROCID")
    if task >= tasks:
        raise UsageError(
            f"SLURM_PROCID={task} does not fit {size_name}={tasks}: ranks count from 0 to size - 1"
        )
    job = environ.get("SLURM_JOB_ID", "")
    here = _tasks_here(environ) or 1
    return Step(
        job=job and f"slurm {job}.{step} restart {environ.get('SLURM_RESTART_COUNT', '0')}",
        task=task,
        tasks=tasks,
        size_name=size_name,
        hosts=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""),
        is_one_host=environ.get("SLURM_STEP_NUM_NODES") == "1",
        tasks_here=here,
        cpus=_count(environ, "SLURM_CPUS_PER_TASK") or max(1, _count(environ, "SLURM_CPUS_ON_NODE") // here),
        gpus=_count(environ, "SLURM_GPUS_PER_TASK") or _count(environ, "SLURM_GPUS_ON_NODE") // here,
    )


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return how many tasks this host has, by a list like `2(x3),1`; 0 if Slurm does not say."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _count(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return a number that may be missing, or have a kind in front of it (`a100:2`)."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if not text:
        raise UsageError(f"{name} is not set, although the launcher's other variables are")
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{name}={text!r} is invalid: expected a whole number from 0")
    return int(text)
