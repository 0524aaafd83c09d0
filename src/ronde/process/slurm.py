"""A Slurm step, and this process's task in it, read from Slurm's variables. Pure.

Slurm sets most of its variables in batch scripts, too, where no task was started: only a step has an id. It writes
lists of hosts in a compressed form: `node[01-03,07],gpu-[1-2]-ib0` means six names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ronde.errors import UsageError

__all__ = [
    "Step",
    "expand_hosts",
    "find_step",
    "launcher_number",
]

# Below the ports that systems give to outgoing connections, above those of well-known services.
FIRST_PORT, PORTS = 12_000, 20_000
MAX_HOSTS = 1 << 20


@dataclass(frozen=True)
class Step:
    """One task's view of its step.

    `job`: names the step, with the same text for all its tasks and another one for any other step; empty if Slurm does
    not name it. `task`: from 0 to `tasks` - 1; `size_name`: the variable with their number. `hosts`: the list of hosts
    as Slurm writes it. `tasks_here`: how many of the tasks are on this host. `cpus`, `gpus`: this task's share.
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
        """How many workers a task has room for: one for each GPU, or one for each processor without GPUs."""
        return self.gpus or self.cpus

    def name(self, uid: int) -> str:
        """Return a name for the step that differs between users."""
        return f"{self.job} of user {uid}"

    def endpoint(self) -> tuple[str, int]:
        """Return a host and port where the tasks can meet: the first host, at a port that follows from the step.

        Raises UsageError if the list of hosts is malformed.
        """
        if not self.hosts:
            raise UsageError(
                "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set, although Slurm's other variables are: give "
                "--rdzv-endpoint HOST:PORT"
            )
        number = int(hashlib.sha256(self.job.encode()).hexdigest(), 16)
        return expand_hosts(self.hosts)[0], FIRST_PORT + number % PORTS


def find_step(environ: Mapping[str, str]) -> Step | None:
    """Return the step of which this process is a task, or None outside of a step. Raises UsageError."""
    step = environ.get("SLURM_STEP_ID")
    if not step or not environ.get("SLURM_PROCID"):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    tasks = launcher_number(environ, size_name)
    if tasks < 1:
        raise UsageError(f"{size_name}={tasks} is invalid: expected at least 1 rank")
    task = launcher_number(environ, "SLURM_PROCID")
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
    """Return the number of tasks on this host, from a list like `2(x3),1`; 0 if Slurm does not set it."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = _count(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return a number after an optional kind (`a100:2`); 0 if the variable is missing or no number."""
    text = environ.get(name, "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


# Lists of hosts


def expand_hosts(text: str) -> list[str]:
    """Return the host names of a compressed list, in order. Raises UsageError if it is malformed."""
    hosts: list[str] = []
    for item in _split_hosts(text):
        hosts.extend(_host_names(item))
        if len(hosts) > MAX_HOSTS:
            raise _host_list_error(text)
    if not hosts:
        raise _host_list_error(text)
    return hosts


def _split_hosts(text: str) -> list[str]:
    """Split at the commas that are not in brackets."""
    if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]*\]|,)*", text):
        raise _host_list_error(text)
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _host_names(item: str) -> list[str]:
    """Return the names that one item stands for; the last bracket counts fastest."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, tail = rest.partition("]")
    tails = _host_names(tail)
    return [head + number + end for number in _host_numbers(inside, item) for end in tails]


def _host_numbers(inside: str, item: str) -> Iterator[str]:
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise _host_list_error(item)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise _host_list_error(item)
        width = len(first) if first.startswith("0") else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}}" if width else str(number)


def _host_list_error(text: str) -> UsageError:
    return UsageError(f"{text[:200]!r} is not a list of hosts as Slurm writes it, like node[01-03,07],login")


def launcher_number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's value. Raises UsageError if it is not set or not a whole number from 0."""
    text = environ.get(name)
    if not text:
        raise UsageError(f"{name} is not set, although the launcher's other variables are")
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{name}={text!r} is invalid: expected a whole number from 0")
    return int(text)
