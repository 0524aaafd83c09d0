"""The configuration of a launch: the contract between the command line or `ronde.run` and the launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ronde.launch.agent.worker_group import FAREWELL_NS, GRACE_NS, PATIENCE_NS
from ronde.rendezvous.rendezvous import RendezvousConfig

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
    """Return the streams of --redirects or --tee, by local rank.

    Args:
        text: A `Std` as a number, such as "3", for all workers (key -1); or numbers by local rank: "0:1,1:3".

    Raises:
        ValueError: The text is another one.
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

    Attributes:
        log_dir: The directory of the logs, with a subdirectory for each run, attempt and local rank, as in torchrun
            (default: none).
        redirects: The streams that go into files there instead of onto the screen, by local rank; the key -1 is for all
            others (default: none).
        tee: The streams that go to both, likewise (default: none).
        filter: The local ranks whose output is shown; None (default): all.
        prefix: The template of the text before each line on the screen, with {rank}, {local_rank}, {host}, {role} and
            {stream}; None: the default.
        timestamps: Whether each line on the screen begins with the time (false).
        by_rank: Whether `log_dir` has horovodrun's layout, a subdirectory for each rank (false).
        duplicates: For OUT and ERR, the texts that select lines of all workers for a collecting file of the attempt
            (default: none).
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

    Attributes:
        argv: The command, whose first word is a path; the launcher replaces macros in it when it starts a worker.
        slots: The number of workers (1).
        role: Their role, as of torchrun ("default").
        max_restarts: How often the job may start its workers again after one has failed (0).
        max_changes: How often after nodes were lost or have joined; -1 (default): without limit.
        spares: How many further workers this node starts, which wait to take the place of lost ones (0).
        min_slots: With how many workers that continue this node goes on without waiting for others in the place of lost
            ones; 0 (default): with `slots`.
        environment: Variables that override the launcher's environment (default: none).
        exported: Those of them that the user named, whose values are never shown.
        preload: Modules that a template process imports before workers are started again; None (default): chosen from
            the script's text; empty: no template.
        fork: Whether the first workers come from the template, too, and wait for its imports (false).
        keeps_template: Whether this process keeps the template after a success, for its next job with the same imports
            (false); only for jobs of the main thread.
        binding: The processors to which each worker is bound (none).
        stop_signal: The number of the signal that asks workers to end (15, SIGTERM).
        grace_ns: The time for workers to notice a failure and end, in nanoseconds (3 s).
        patience_ns: The time from one signal to the next, stronger one, in nanoseconds (5 s).
        farewell_ns: The same if a signal from outside, not a typed one, ends the job (30 s).
        signals: The numbers of the signals that the launcher passes on to the workers, and that end the job (SIGHUP,
            SIGINT, SIGQUIT and SIGTERM).
        virtual_local_rank: Whether each worker sees one GPU, as device 0, and local rank 0 (false).
        key_by_descriptor: Whether workers get the job key in a memory file instead of their environment (false).
    """

    argv: tuple[str, ...]
    slots: int = 1
    role: str = "default"
    max_restarts: int = 0
    max_changes: int = -1
    spares: int = 0
    min_slots: int = 0
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    exported: frozenset[str] = frozenset()
    preload: tuple[str, ...] | None = None
    fork: bool = False
    keeps_template: bool = False
    binding: Binding = Binding.NONE
    stop_signal: int = 15
    grace_ns: int = GRACE_NS
    patience_ns: int = PATIENCE_NS
    farewell_ns: int = FAREWELL_NS
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    virtual_local_rank: bool = False
    key_by_descriptor: bool = False

    def longest_end_ns(self, farewell: bool = True) -> int:
        """Return the longest time that the end of the workers takes, in nanoseconds. Raises nothing.

        Args:
            farewell: Whether a signal from outside, not a typed one, ends them (true).
        """
        return self.grace_ns + (self.farewell_ns if farewell else self.patience_ns) + self.patience_ns


@dataclass(frozen=True)
class Ssh:
    """How ssh reaches other machines.

    Attributes:
        port: The port of the servers; None (default): as the user's configuration of ssh says.
        identity_file: The path of the private key; None (default): likewise.
    """

    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True)
class Discovery:
    """A program that prints the available hosts, one per line, as `name` or `name:slots`.

    Attributes:
        script: A file, or a command with arguments.
        slots: The number of slots of a host that is printed without one (1).
        first_workers: The number of workers for which the hosts must have room before the job begins (0).
    """

    script: str
    slots: int = 1
    first_workers: int = 0


@dataclass(frozen=True)
class LaunchConfig:
    """The configuration of one node's agent.

    Attributes:
        worker: What the workers run.
        rendezvous: How the nodes find each other (default: a job of one node).
        outputs: Where the workers' output goes (default: onto the screen).
        master_addr: The user's MASTER_ADDR for workers; None (default): the agents agree on it.
        master_port: The user's MASTER_PORT for workers; None (default): the agents agree on it.
        local_addr: The address by which other nodes reach this one; None (default): the agent finds it.
        interface: The network interface that has this address on every host (default: none given).
        hosts: The name and the number of slots of each machine on which to start an agent by SSH (default: none).
        discovery: The program that finds such machines (default: none). Without `hosts` and `discovery`, the job runs
            on this machine.
        ssh: How ssh reaches them (default: as the user's configuration of ssh says).
        min_workers: How many workers the job needs on all these hosts together; 0 (default): as many as there are
            slots.
        max_workers: How many workers it takes; 0 (default): no limit.
        cooldown_ns: The shortest and longest time for which a failed host is not used, in nanoseconds; None (default):
            for ever.
        start_timeout_ns: The time within which all nodes are reached and the store answers, in nanoseconds (300 s).
        monitor_interval_ns: The interval between checks whether a worker is stopped, in nanoseconds (0.1 s).
        insecure_job_key: Whether nodes without a key take one that follows from the job's name (false).
        shares_hosts: Whether nodes on one host (`net/host`) share its local ranks (false); else each node counts as one
            host.
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
