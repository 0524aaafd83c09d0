"""What is to be launched, and how: the contract between those who ask (the command line, Python) and the launchers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from ronde.core.worker_group import FAREWELL_NS, GRACE_NS, PATIENCE_NS
from ronde.light_dataclasses import dataclass, field
from ronde.net.rendezvous.config import RendezvousConfig

__all__ = [
    "DEFAULT_SIGNALS",
    "Binding",
    "Discovery",
    "LaunchConfig",
    "Outputs",
    "RendezvousConfig",
    "Ssh",
    "Std",
    "WorkerSpec",
    "parse_streams",
]

SECOND = 10**9
DEFAULT_SIGNALS = (1, 2, 3, 15)  # SIGHUP, SIGINT, SIGQUIT and SIGTERM, as torchrun has them


class Std(Enum):
    """Which of a worker's streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_streams(text: str) -> dict[int, Std]:
    """Return what --redirects and --tee mean: one of 0 to 3 for all workers (key -1), or as in 0:1,1:3 by local rank.

    Raises ValueError if it means nothing.
    """
    values = {str(std.value): std for std in Std}
    if text in values:
        return {-1: values[text]}
    streams = {}
    for entry in text.split(","):
        local_rank, colon, value = entry.partition(":")
        if not (colon and value in values and local_rank.isascii() and local_rank.isdecimal()):
            raise ValueError(text)
        streams[int(local_rank)] = values[value]
    return streams


class Binding(Enum):
    """To which processors each worker is bound."""

    NONE = "none"
    CORES = "cores"  # an equal share of the usable cores each
    NUMA = "numa"  # the cores of a NUMA node each


@dataclass(frozen=True)
class Outputs:
    """Where the workers' output goes.

    `log_dir`: a directory that gets one subdirectory for each run, attempt and local rank, as torchrun lays them out.
    `redirects`, `tee`: by local rank, which streams go into files there, and which of those onto the screen too; the
    entry -1 is for all others. `filter`: the local ranks whose output is shown, None for all. `prefix`: the template of
    what stands before each line on the screen, with {rank}, {local_rank}, {host}, {role}; None for the default.
    `timestamps`: every line on the screen begins with the time. `by_rank`: the directory gets horovodrun's layout
    instead, a subdirectory for each rank. `duplicates`: for OUT and ERR, texts; lines of any worker that contain one of
    them are collected in a file of the attempt, too.
    """

    log_dir: str | None = None
    redirects: Mapping[int, Std] = field(default_factory=dict)
    tee: Mapping[int, Std] = field(default_factory=dict)
    filter: frozenset[int] | None = None
    prefix: str | None = None
    timestamps: bool = False
    by_rank: bool = False
    duplicates: Mapping[Std, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerSpec:
    """What each worker of this node runs.

    `argv`: the command, whose first word is a path; macros in the arguments stay as they are until a worker is started.
    `environment`: what goes before the launcher's own environment; `exported`: the variables of it that the user named,
    whose values are shown to nobody. `preload`: modules that a template process has
    imported before workers are started again; None: chosen by looking at the script; empty: no template. `fork`:
    workers come from the template the first time too, which waits for its imports. `key_by_descriptor`: workers get the
    job key in a memory file instead of their environment. `signals`: those that we pass on to
    the workers, and that end them. `virtual_local_rank`: each worker sees one GPU, as its first, and local rank 0.
    """

    argv: tuple[str, ...]
    slots: int = 1
    role: str = "default"
    max_restarts: int = 0
    max_changes: int = -1
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    exported: frozenset[str] = frozenset()
    preload: tuple[str, ...] | None = None
    fork: bool = False
    binding: Binding = Binding.NONE
    stop_signal: int = 15
    grace_ns: int = GRACE_NS  # for workers to notice a failure by themselves
    patience_ns: int = PATIENCE_NS  # for each signal to work
    farewell_ns: int = FAREWELL_NS  # for what was told to end by a signal from outside, not typed
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    virtual_local_rank: bool = False
    key_by_descriptor: bool = False

    def longest_end_ns(self, farewell: bool = True) -> int:
        """Return how long it may take at most until workers that are to end are gone; `farewell`: by a signal."""
        return self.grace_ns + (self.farewell_ns if farewell else self.patience_ns) + self.patience_ns


@dataclass(frozen=True)
class Ssh:
    """How other machines are reached; None leaves it to the user's own configuration of ssh."""

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class Discovery:
    """A program that prints the hosts that are there now, one in a line, as `name` or `name:slots`.

    `script`: a file, or a command with arguments. `slots`: of a host without a number. `first_workers`: the job does
    not begin before there is room for so many.
    """

    script: str
    slots: int = 1
    first_workers: int = 0


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that the agent of one node needs to know.

    `master_addr`, `master_port`: given by the user for workers, else the agents agree on them. `local_addr`: the
    address by which other nodes reach this one, else it is found out. `interface`: the network interface that has that
    address, on every host. `hosts`: (name, slots) of machines on which to start agents by SSH, and `discovery`: what
    finds them; neither for this machine only. `min_workers`, `max_workers`: with these two, how many workers of all
    hosts together the job needs and takes; 0: as many as there are slots, no limit. `cooldown_ns`: how long a host that
    failed is left alone, at first and at most; None: for good. `start_timeout_ns`: until all nodes have been reached
    and the store has answered. `insecure_job_key`: nodes without a key take one that follows from the job's name.
    """

    worker: WorkerSpec
    rendezvous: RendezvousConfig = field(default_factory=RendezvousConfig)
    outputs: Outputs = field(default_factory=Outputs)
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    interface: str | None = None
    hosts: tuple[tuple[str, int], ...] = ()
    discovery: Discovery | None = None
    ssh: Ssh = field(default_factory=Ssh)
    min_workers: int = 0
    max_workers: int = 0
    cooldown_ns: tuple[int, int] | None = None
    start_timeout_ns: int = 300 * SECOND
    monitor_interval_ns: int = SECOND // 10
    insecure_job_key: bool = False
