"""Starts the workers of one node: with their output, on their cores, as new processes or from a template.

An agent has one starter, and asks it for one worker after the other. If workers may have to start again,
`prepare_template` makes a template meanwhile; without a usable template each worker is a new process. `shares` chooses
the processors to which each worker is bound, so that workers share no caches or memory nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypedDict

from ronde.launch.agent.living_worker import LivingWorker
from ronde.launch.agent.outputs import Complain, RunOutputs, WorkerOutput
from ronde.launch.config import Binding, LaunchConfig
from ronde.launch.launch_plan import UNPLACED, WorkerPlan
from ronde.launch.templates.template import Template, command_of, keep_template, take_template
from ronde.net.host import host_name
from ronde.process.disk import LogWriter
from ronde.process.membership_channel import MembershipChannel
from ronde.process.process_groups import GroupLeader, Guard, Process, is_in_background
from ronde.process.resources import usable_core_numbers
from ronde.process.signals import SignalInbox
from ronde.process.uncaught import Announcements

__all__ = [
    "Core",
    "Starter",
    "shares",
    "usable_machine",
]

IMPORTS_NS = 120 * 10**9  # how long workers wait for a template that --start-method asks for
HEAD_START_NS = 5 * 10**9  # how long others wait at most


class _StartOptions(TypedDict):
    stdout: int | None
    stderr: int | None
    keep: Sequence[int]
    cores: Collection[int] | None


class Starter:
    """Starts workers.

    `environment`: the launcher's. `complain`: shows the user a problem. `keep`: descriptors that all workers inherit;
    with `reads` the first one inherits standard input, too. `reports`: the launcher shows tracebacks. Raises UsageError
    if this machine cannot do what the configuration says. Close it when all workers are gone.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environment: Mapping[str, str],
        run_id: str,
        complain: Complain,
        *,
        keep: Sequence[int] = (),
        reads: bool = False,
        reports: bool = False,
    ) -> None:
        self._environment = environment
        self._keep = keep
        self._reads = reads
        self._complain = complain
        self._spec = config.worker
        self._template: Template | None = None
        self._said = False  # whether the user knows why the template cannot be used
        self._outputs = RunOutputs(
            config.outputs,
            run_id,
            complain,
            role=config.worker.role,
            host=host_name(),
            several=config.rendezvous.max_nodes > 1,
            reports=reports,
        )
        self._guard = Guard(self._outputs.temporary)
        self.announcements = Announcements()

    def start_worker(
        self, worker: WorkerPlan, attempt: int, signals: SignalInbox, has_channel: bool = False
    ) -> LivingWorker:
        """Start a worker; `attempt` is the number of the round. `has_channel`: it can outlive the round.

        Raises OSError if the worker cannot start, and InterruptedError if one of the `signals` comes first.
        """
        size = int(worker.environment.get("WORLD_SIZE", "1"))
        output = self._outputs.worker(attempt, worker, size)
        channel = MembershipChannel() if has_channel else None
        theirs = self._environment
        if worker.rank < 0:
            theirs = {name: value for name, value in theirs.items() if name not in UNPLACED}
        environment = {
            **theirs,
            **worker.environment,
            **output.environment,
            **self.announcements.environment,
            **(channel.environment if channel else {}),
        }
        try:
            process = self._start_process(worker, environment, output, channel, signals)
        except BaseException:
            if channel:
                channel.close()
            raise
        if channel:
            channel.close_worker_end()
        process.guard = self._guard
        self._guard.add(process.pid)
        return LivingWorker(process, output, channel, time.monotonic_ns())

    def _start_process(
        self,
        worker: WorkerPlan,
        environment: Mapping[str, str],
        output: WorkerOutput,
        channel: MembershipChannel | None,
        signals: SignalInbox,
    ) -> GroupLeader:
        with output.files() as (stdout, stderr):
            reads = self._reads and worker.index == 0 and not is_in_background(0)
            fds = [channel.worker_fd] if channel else []
            keep = (*self._keep, self.announcements.worker_fd, *fds, *([0] if reads else []))
            options = _StartOptions(stdout=stdout, stderr=stderr, keep=keep, cores=self._cores(worker))
            process = self._from_template(worker.argv, environment, options, signals)
            if process is None:
                process = Process(worker.argv, environment, **options)
        return process

    def _cores(self, worker: WorkerPlan) -> Collection[int] | None:
        """Return the processors of a worker; None for all."""
        binding = self._spec.binding
        if binding is Binding.NONE:
            return None
        if worker.rank < 0:
            return None  # it may get any place
        local_size = int(worker.environment["LOCAL_WORLD_SIZE"])
        return shares(binding, local_size, usable_machine())[worker.local_rank]

    def await_template(self, worker: WorkerPlan, signals: SignalInbox) -> None:
        """Wait for the template as long as that is faster than importing again. Call this before each round.

        The wait ends when one of the `signals` comes.
        """
        waits_ns = 0
        if self._spec.fork and self._template is None:
            self.prepare_template(worker)
            waits_ns = IMPORTS_NS
        elif self._template is not None:  # a new process would need at least this time
            waits_ns = min(time.monotonic_ns() - self._template.begun_ns, HEAD_START_NS)
        if self._template is not None:
            self._template.is_ready(time.monotonic_ns() + waits_ns, signals)

    def prepare_template(self, worker: WorkerPlan) -> None:
        """Begin to make a template for such workers, if the user wants one and the command allows it."""
        if self._template is not None or self._spec.preload == ():
            return
        if command_of(worker.argv) is None:
            return
        environment = {**self._environment, **worker.environment}
        if self._spec.keeps_template:
            self._template = take_template(worker.argv, environment, self._spec.preload)
            if self._template is not None:
                return
        try:
            self._template = Template(worker.argv, environment, self._spec.preload)
        except OSError as error:
            self._complain(f"there is no template for restarts: {error.strerror or error}")

    def _from_template(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        options: _StartOptions,
        signals: SignalInbox,
    ) -> GroupLeader | None:
        template = self._template
        if template is None:
            return None
        process = template.start_worker(argv, environment, signals=signals, **options)
        if template.problem and not self._said:
            self._said = True
            self._complain(f"workers import modules themselves, without the template: {template.problem}")
        return process

    @property
    def logs(self) -> LogWriter:
        """The writer of the files of --tee."""
        return self._outputs.logs

    def end_successfully(self) -> None:
        """Keep the template for the next job of this process if the configuration says so. Call this before `close`."""
        if self._spec.keeps_template and self._template is not None and self._template.is_ready():
            keep_template(self._template)
            self._template = None

    def close(self) -> None:
        """End the template and the guard, and close the outputs."""
        if self._template is not None:
            self._template.close()
        self.announcements.close()
        self._guard.close()
        self._outputs.close()


_CORES = "/sys/devices/system/cpu"


class Core(NamedTuple):
    """A processor as the kernel counts them; sorted, those that are near each other are neighbours.

    Hardware threads of one `physical` core share its caches; cores of one NUMA `node` share its memory.
    """

    node: int
    package: int
    physical: int
    number: int


def shares(binding: Binding, workers: int, cores: Sequence[Core]) -> list[frozenset[int] | None]:
    """Return the processors of each local rank; None for all.

    CORES: shares as equal as possible; if there are more workers than processors, several workers share one. NUMA: all
    processors of one node; neighbouring ranks are on the same node.
    """
    if binding is Binding.NONE:
        return [None] * workers
    if binding is Binding.NUMA:
        nodes: dict[int, set[int]] = {}
        for core in sorted(cores):
            nodes.setdefault(core.node, set()).add(core.number)
        by_node = list(nodes.values())
        return [frozenset(by_node[rank * len(by_node) // workers]) for rank in range(workers)]
    numbers = [core.number for core in sorted(cores)]
    firsts = [rank * len(numbers) // workers for rank in range(workers + 1)]
    return [frozenset(numbers[first : max(next_, first + 1)]) for first, next_ in zip(firsts, firsts[1:])]


def usable_machine() -> list[Core]:
    """Return the processors on which this process may run."""
    return [
        Core(_node_of(number), _number(number, "physical_package_id"), _number(number, "core_id"), number)
        for number in usable_core_numbers()
    ]


def _node_of(number: int) -> int:
    """Return the NUMA node of a processor; 0 if the kernel does not report it."""
    try:
        names = os.listdir(f"{_CORES}/cpu{number}")
    except OSError:
        return 0
    return next((int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal()), 0)


def _number(number: int, name: str) -> int:
    try:
        with open(f"{_CORES}/cpu{number}/topology/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
