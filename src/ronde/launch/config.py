"""What is to be launched, and how: the contract between those who ask (the command line, Python) and the launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ronde.net.rendezvous.config import RendezvousConfig

__all__ = ["Binding", "LaunchConfig", "Outputs", "RendezvousConfig", "Std", "WorkerSpec"]

SECOND = 10**9


class Std(Enum):
    """Which of a worker's streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class Binding(Enum):
    """To which processors each worker is bound."""

    NONE = "none"
    CORES = "cores"  # an equal share of the usable cores each
    NUMA = "numa"  # the cores of a NUMA node each, in turn


@dataclass(frozen=True)
class Outputs:
    """Where the workers' output goes.

    `log_dir`: a directory that gets one subdirectory for each run, attempt and local rank, as torchrun lays them out.
    `redirects`, `tee`: by local rank, which streams go into files there, and which of those onto the screen too; the
    entry -1 is for all others. `filter`: the local ranks whose output is shown, None for all. `prefix`: the template of
    what stands before each line on the screen, with {rank}, {local_rank}, {host}, {role}; None for the default.
    """

    log_dir: str | None = None
    redirects: Mapping[int, Std] = field(default_factory=dict)
    tee: Mapping[int, Std] = field(default_factory=dict)
    filter: frozenset[int] | None = None
    prefix: str | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """What each worker of this node runs.

    `argv`: the command, whose first word is a path; macros in the arguments stay as they are until a worker is started.
    `environment`: what goes before the launcher's own environment. `preload`: modules that a template process has
    imported before workers are started again; None: chosen by looking at the script; empty: no template.
    """

    argv: tuple[str, ...]
    slots: int = 1
    role: str = "default"
    max_restarts: int = 0
    max_changes: int = -1
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] | None = None
    binding: Binding = Binding.NONE
    stop_signal: int = 15
    grace_ns: int = 3 * SECOND  # for workers to notice a failure by themselves
    patience_ns: int = 5 * SECOND  # for each signal to work


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that the agent of one node needs to know.

    `master_addr`, `master_port`: given by the user for workers, else the agents agree on them. `local_addr`: the
    address by which other nodes reach this one, else it is found out. `hosts`: (name, slots) of machines on which to
    start agents by SSH; empty for this machine only.
    """

    worker: WorkerSpec
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    outputs: Outputs = field(default_factory=Outputs)
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    monitor_interval_ns: int = SECOND // 10
