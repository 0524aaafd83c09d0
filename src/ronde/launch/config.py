"""The configuration of a launch: the contract between the command line or `ronde.run` and the launchers."""

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
    """A selection of a worker's two output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


def parse_streams(text: str) -> dict[int, Std]:
    """Return the streams of --redirects or --tee: `3` is for all workers (key -1), `0:1,1:3` by local rank.

    Raises ValueError for any other text.
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
    """The processors to which each worker is bound."""

    NONE = "none"
    CORES = "cores"  # an equal share of the usable cores each
    NUMA = "numa"  # the cores of a NUMA node each


@dataclass(frozen=True)
class Outputs:
    """Where the workers' output goes.

    `log_dir`: the directory of the logs, with a subdirectory for each run, attempt and local rank, as in torchrun.
    `redirects`: the streams that go into files there instead of onto the screen, by local rank; the key -1 is for all
    others. `tee`: the streams that go to both. `filter`: the local ranks whose output is shown; None: all. `prefix`:
    the template of the text before each line on the screen, with {rank}, {local_rank}, {host}, {role} and {stream};
    None: the default. `timestamps`: each line on the screen begins with the time. `by_rank`: `log_dir` has horovodrun's
    layout, a subdirectory for each rank. `duplicates`: for OUT and ERR, the texts that select lines of all workers for
    a collecting file of the attempt.
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

    `argv`: the command, whose first word is a path; the launcher replaces macros in it when it starts a worker.
    `environment`: variables that override the launcher's environment; `exported`: those of them that the user named,
    whose values are never shown. `preload`: modules that a template process imports before workers are started again;
    None: chosen from the script's text; empty: no template. `fork`: the first workers come from the template, too, and
    wait for its imports. `keeps_template`: after a success this process keeps the template for its next job with the
    same imports; only for jobs of the main thread. `key_by_descriptor`: workers get the job key in a memory file
    instead of their environment. `signals`: those that the launcher passes on to the workers, and that end the job.
    `virtual_local_rank`: each worker sees one GPU, as device 0, and local rank 0.
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
    keeps_template: bool = False
    binding: Binding = Binding.NONE
    stop_signal: int = 15
    grace_ns: int = GRACE_NS  # for workers to notice a failure and end
    patience_ns: int = PATIENCE_NS  # from one signal to the next, stronger one
    farewell_ns: int = FAREWELL_NS  # ... if a signal from outside, not a typed one, ends the job
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    virtual_local_rank: bool = False
    key_by_descriptor: bool = False

    def longest_end_ns(self, farewell: bool = True) -> int:
        """Return the longest time that the end of the workers takes; `farewell`: a signal from outside ends them."""
        return self.grace_ns + (self.farewell_ns if farewell else self.patience_ns) + self.patience_ns


@dataclass(frozen=True)
class Ssh:
    """How ssh reaches other machines; None: as the user's configuration of ssh says."""

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class Discovery:
    """A program that prints the available hosts, one per line, as `name` or `name:slots`.

    `script`: a file, or a command with arguments. `slots`: of a host without a number. `first_workers`: the number of
    workers for which the hosts must have room before the job begins.
    """

    script: str
    slots: int = 1
    first_workers: int = 0


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration of one node's agent.

    `master_addr`, `master_port`: the user's values for workers; None: the agents agree on them. `local_addr`: the
    address by which other nodes reach this one; None: the agent finds it. `interface`: the network interface that has
    this address on every host. `hosts`: name and slots of each machine on which to start an agent by SSH; `discovery`:
    the program that finds them; without both, the job runs on this machine. `min_workers`, `max_workers`: how many
    workers on all these hosts together the job needs and takes; 0: as many as there are slots, no limit. `cooldown_ns`:
    the shortest and longest time for which a failed host is not used; None: for ever. `start_timeout_ns`: the time
    within which all nodes are reached and the store answers. `insecure_job_key`: nodes without a key take one that
    follows from the job's name. `shares_hosts`: nodes on one host (`net/host`) share its local ranks; else each node
    counts as one host.
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
    shares_hosts: bool = False
