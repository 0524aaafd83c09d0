"""The launch plan: the ranks, the command and the environment of each worker of a node. Pure.

Ranks follow from the nodes of a round alone, so every node computes the same:

1. Global ranks count the workers of all nodes in the order of the nodes; role ranks count those of nodes with the same
   role.
2. Each node counts as one host, as in torchrun; nodes that have the same `host_id` count as one together. Local ranks
   count the workers of a host. Hosts are in the order of their first nodes.
3. The group rank is the position of the worker's host among all hosts; the cross rank, among the hosts that have a
   worker with its local rank.
"""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import UsageError
from ronde.rendezvous.membership import Node, Round

if TYPE_CHECKING:
    from ronde.job_key import JobKey
    from ronde.launch.config import WorkerSpec

__all__ = [
    "OURS",
    "PLACE",
    "UNPLACED",
    "LaunchPlan",
    "WorkerPlan",
    "WorkerRanks",
    "assign_places",
    "assignments",
    "own_gpus",
    "plan_reserve",
    "plan_workers",
    "ranks_of",
]


class WorkerRanks(NamedTuple):
    """All ranks and sizes of one worker; `group_rank` and `group_size` count hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    group_rank: int
    group_size: int
    role: str
    role_rank: int
    role_size: int


def ranks_of(nodes: Sequence[Node], place: int) -> tuple[WorkerRanks, ...]:
    """Return the ranks of the workers of the node at this place in the order of `nodes`."""
    mine, before = nodes[place], nodes[:place]
    first = sum(node.slots for node in before)
    first_of_role = sum(node.slots for node in before if node.role == mine.role)
    host_of = [node.host_id or number for number, node in enumerate(nodes)]
    first_of_host = sum(node.slots for node, host in zip(before, host_of) if host == host_of[place])
    workers: dict[Hashable, int] = {}  # by host
    for node, host in zip(nodes, host_of):
        workers[host] = workers.get(host, 0) + node.slots
    sizes = list(workers.values())
    group_rank = list(workers).index(host_of[place])
    return tuple(
        WorkerRanks(
            rank=first + index,
            size=sum(sizes),
            local_rank=local_rank,
            local_size=sizes[group_rank],
            cross_rank=sum(size > local_rank for size in sizes[:group_rank]),
            cross_size=sum(size > local_rank for size in sizes),
            group_rank=group_rank,
            group_size=len(sizes),
            role=mine.role,
            role_rank=first_of_role + index,
            role_size=sum(node.slots for node in nodes if node.role == mine.role),
        )
        for index, local_rank in enumerate(range(first_of_host, first_of_host + mine.slots))
    )


JOB_KEY, JOB_KEY_FD = "RONDE_JOB_KEY", "RONDE_JOB_KEY_FD"
# The variables of a worker's ranks and meeting point. The user cannot override them.
OURS = frozenset((
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "RONDE_STORE", "RONDE_JOB_ID", "RONDE_ROUND",
    JOB_KEY, JOB_KEY_FD,
))  # fmt: skip
# What `PlaceInRound` carries to a worker that continues. It has read the key from a descriptor already, and no process
# can change the GPU that it sees.
PLACE = OURS - {JOB_KEY_FD} | {"MASTER_ADDR", "MASTER_PORT"}
# What a worker without a place does not get.
UNPLACED = OURS - {JOB_KEY, JOB_KEY_FD} | {"MASTER_ADDR", "MASTER_PORT"}
HIDDEN = "<hidden>"
LOCAL_RANK_MACRO = "${local_rank}"


def assign_places(homes: Sequence[int], size: int) -> list[int]:
    """Return the place among the `size` workers of a node for each worker that continues.

    `homes`: their first places. A worker returns to its first place where that exists and is free, because it may use
    the GPU of that number; so a new worker finds the one of the lost worker. Others get the lowest places of the rest.
    """
    places: dict[int, int] = {}  # number of the worker by place
    for worker, home in enumerate(homes):
        if home < size:
            places.setdefault(home, worker)
    settled = {worker: place for place, worker in places.items()}
    free = iter(place for place in range(size) if place not in places)
    return [settled[worker] if worker in settled else next(free) for worker in range(len(homes))]


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its command, and the variables that it gets beyond the launcher's environment.

    `local_rank`: its number among the workers of its host; `index`: among those of its agent.
    """

    rank: int
    local_rank: int
    index: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # the job key is in it


@dataclass(frozen=True)
class LaunchPlan:
    """All workers of the job, by rank."""

    workers: tuple[WorkerPlan, ...]
    hidden: frozenset[str] = frozenset()  # variables whose values are never shown; nor is the job key

    def describe(self) -> str:
        """Return the plan as text, without secrets."""
        count = len(self.workers)
        lines = [
            f"{count} worker{'s' if count > 1 else ''} on this machine",
            "",
            "environment of every worker:",
        ]
        shared = set.intersection(*(set(worker.environment.items()) for worker in self.workers))
        lines += [f"    {text}" for text in assignments(shared, self.hidden)]
        for worker in self.workers:
            lines += ["", f"rank {worker.rank}:"]
            own = set(worker.environment.items()) - shared
            lines += [f"    {text}" for text in assignments(own, self.hidden)]
            lines += [f"    {shlex.join(worker.argv)}"]
        return "\n".join(lines) + "\n"


def assignments(variables: set[tuple[str, str]], hidden: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the assignments of variables for a shell, sorted, without the values of the job key and of `hidden`."""
    for name, value in sorted(variables):
        yield f"{name}={HIDDEN if name == JOB_KEY or name in hidden else shlex.quote(value)}"


def plan_workers(
    spec: WorkerSpec,
    round: Round,
    *,
    environment: Mapping[str, str],
    cores: int,
    job_key: JobKey,
    key_fd: int | None = None,
    run_id: str,
    master: tuple[str | None, int | None] = (None, None),
    columns: int | None = None,
    host: str = "",
) -> LaunchPlan:
    """Return the plan for the workers of this node in the round.

    `environment`: the launcher's, in which the user may have set variables. `cores`: the number that the workers of
    this host share. `key_fd`: the workers inherit this memory file with the key, instead of finding the key in their
    environment. `master`: the MASTER_ADDR and MASTER_PORT that the user gave; None: the node of rank 0 chooses.
    `columns`: the width of the terminal that shows the output, None without one. `host`: the name at the beginning of
    each line there, if any.
    """
    workers = ranks_of(round.nodes, round.group_rank)
    leader = round.nodes[0]
    any_worker = workers[0]
    ours = {
        "WORLD_SIZE": str(any_worker.size),
        "LOCAL_WORLD_SIZE": str(any_worker.local_size),
        "GROUP_RANK": str(any_worker.group_rank),
        "GROUP_WORLD_SIZE": str(any_worker.group_size),
        "ROLE_NAME": any_worker.role,
        "ROLE_WORLD_SIZE": str(any_worker.role_size),
        "RONDE_JOB_ID": round.job,
        "RONDE_ROUND": str(round.number),
        "TORCHELASTIC_RESTART_COUNT": str(round.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 of the user's program serves at MASTER_PORT
        "HOROVOD_SIZE": str(any_worker.size),
        "HOROVOD_LOCAL_SIZE": str(any_worker.local_size),
        "RONDE_STORE": leader.store,
        **({JOB_KEY: job_key.hex()} if key_fd is None else {JOB_KEY_FD: str(key_fd)}),
    }
    defaults = {
        "MASTER_ADDR": master[0] or leader.address,
        "MASTER_PORT": str(master[1] or leader.master_port),
        "HOROVOD_HOSTNAME": round.nodes[round.group_rank].host,
    }
    unless_set = {
        # Otherwise each worker would start a thread for each core.
        "OMP_NUM_THREADS": str(max(1, cores // any_worker.local_size)),
        "PYTHONUNBUFFERED": "1",  # lines appear at once, and survive a killed worker
        "PYTHONFAULTHANDLER": "1",  # a fatal signal prints the stacks of all threads
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if columns is not None:
        prefix = len(f"[{host}:{workers[-1].rank}] " if host else f"[{workers[-1].rank}] ")
        unless_set["COLUMNS"] = str(max(1, columns - prefix))  # a progress bar fits beside the prefix
    defaults |= {name: value for name, value in unless_set.items() if name not in environment}
    wanted = {name: value for name, value in spec.environment.items() if name not in OURS}
    shared = {**defaults, **wanted, **ours}
    gpus = own_gpus(spec, environment, any_worker.local_rank, any_worker.local_size)
    plans = tuple(
        _plan_worker(index, worker, spec.argv, shared, gpus) for index, worker in enumerate(workers)
    )
    return LaunchPlan(plans, spec.exported)


def own_gpus(
    spec: WorkerSpec, environment: Mapping[str, str], first: int = 0, local_size: int = 0
) -> Sequence[str]:
    """Return the one GPU that each worker of this node sees, in their order; empty if workers see all GPUs.

    `first`: the first worker's local rank. `local_size`: the number of workers on the host; if the environment names
    fewer GPUs, these are for this node only. Raises UsageError if they are too few for it, too.
    """
    if not spec.virtual_local_rank:
        return ()
    visible = {**environment, **spec.environment}.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(first + index) for index in range(spec.slots)]
    names = [name.strip() for name in visible.split(",")]
    if len(names) < spec.slots or not all(names):
        raise UsageError(
            f"--virtual-local-rank gives each of {spec.slots} workers its own GPU, but CUDA_VISIBLE_DEVICES="
            f"{visible} names fewer: start fewer workers, or name more"
        )
    return names[first:] if len(names) >= local_size else names


def plan_reserve(plan: LaunchPlan, key: int) -> WorkerPlan:
    """Return the plan of a worker without a place, beside the workers of this plan; its rank is negative.

    `key`: its number among all such workers of this agent.
    """
    first = plan.workers[0]
    variables = {name: value for name, value in first.environment.items() if name not in UNPLACED}
    index = len(plan.workers) + key
    return WorkerPlan(-1 - key, index, index, first.argv, variables)


def _plan_worker(
    index: int, worker: WorkerRanks, argv: Sequence[str], shared: Mapping[str, str], gpus: Sequence[str]
) -> WorkerPlan:
    own = {
        "RANK": worker.rank,
        "LOCAL_RANK": worker.local_rank,
        "ROLE_RANK": worker.role_rank,
        "HOROVOD_RANK": worker.rank,
        "HOROVOD_LOCAL_RANK": worker.local_rank,
        "HOROVOD_CROSS_RANK": worker.cross_rank,
        "HOROVOD_CROSS_SIZE": worker.cross_size,
    }
    words = tuple(word.replace(LOCAL_RANK_MACRO, str(worker.local_rank)) for word in argv)
    variables = {name: str(value) for name, value in own.items()}
    if gpus:
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[index]}
    return WorkerPlan(worker.rank, worker.local_rank, index, words, {**shared, **variables})
