"""Runs a Python function in tasks of a cluster, one worker in each, and returns its results."""

from __future__ import annotations

import io
import math
import operator
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NoReturn, TextIO

from ronde.environment import environment as own_environment
from ronde.errors import TimeoutError, UsageError, WorkerError
from ronde.launch.calls import load_result, pack_call, worker_error
from ronde.launch.clusters.cluster import Cluster
from ronde.launch.config import LaunchConfig, Outputs, RendezvousConfig, WorkerSpec
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.driver_messages import JobEnd
from ronde.launch.driver.job_store import JobMemory, fetch_result
from ronde.launch.driver.task_agents import TaskAgents
from ronde.launch.hosts.ssh import settings_that_travel
from ronde.launch.screen import claim_standard_streams
from ronde.net.authentication import SECRET
from ronde.rendezvous.membership import Failure
from ronde.stores.store import Store
from ronde.values import PROTECTION

__all__ = [
    "ELASTIC_RESTARTS",
    "RunOptions",
    "interface_names",
    "run_function",
    "run_packed_call",
    "start_timeout_ns",
]

SECOND = 10**9
START_TIMEOUT_S = 600.0
ELASTIC_RESTARTS = 20  # by default: a function that always fails must not start again for ever
PROTECTION_VARIABLE = "RONDE_PROTECTION"
LAST_PORT = 65535
BACKENDS_VARIABLE = "RONDE_BACKENDS"
USAGE_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT


@dataclass(frozen=True)
class RunOptions:
    """How a function runs on a cluster.

    Attributes:
        num_proc: The number of workers, the ranks of the job; of an elastic job the largest number.
        min_num_proc: With how many an elastic job begins and goes on; None: the number is fixed.
        start_timeout_ns: Within which all tasks must have registered, in nanoseconds.
        environment: Variables for the workers, which override those of their tasks.
        stdout: Takes the output of the workers; None: `sys.stdout`.
        stderr: Takes their errors, and the driver's messages; None: `sys.stderr`.
        is_talkative: Whether the driver says which tasks it awaits.
        interface: The name of the network interface by which the hosts reach each other, or several names, separated
            by commas; None: found out among all. The driver also listens there, if its machine has one of them.
        has_timestamps: Whether each line of output begins with the time.
        prefix: The template of the text before each line of output, with {rank}, {local_rank}, {host} and
            {stream}; None: `[host:rank] `.
        python: The Python that runs agents and workers; None: that of their tasks.
        encrypts: Whether all connections are encrypted, also those with tensors. The setting `protection` does the
            same, in `environment` or in that of this process.
        max_restarts: How often workers of an elastic job are started again after one has failed. The next failure
            ends the job. The loss of a task is not one.
        first_host: The name of the host that gets rank 0; empty: that of slot 0.
        driver_address: An address or a name by which tasks reach this machine, tried before those that it has itself,
            as behind a NAT; empty: only those.
        driver_port: Where the driver listens for tasks; their agents come to the next port, too. 0: any two ports.
        mpi_options: Start the workers by Open MPI's mpirun, with these further options; None: without MPI.
    """

    num_proc: int
    min_num_proc: int | None = None
    start_timeout_ns: int = int(START_TIMEOUT_S * SECOND)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    is_talkative: bool = True
    interface: str | None = None
    has_timestamps: bool = False
    prefix: str | None = None
    python: str | None = None
    encrypts: bool = False
    max_restarts: int = 0
    first_host: str = ""
    driver_address: str = ""
    driver_port: int = 0
    mpi_options: Sequence[str] | None = None


def run_function(
    cluster: Cluster,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: RunOptions,
    memory: JobMemory | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in tasks of the cluster; return a list of the results by rank.

    Any thread may call it, several at once. In the main thread, Ctrl-C ends the job. `memory`: offered to the workers,
    and collected if the job fails.

    Raises:
        WorkerError: A worker has failed, or a task or the cluster's job was lost. All workers have ended.
        TimeoutError: Too few tasks registered within the start timeout.
        UsageError: An option is invalid, or the function cannot be sent.
        KeyboardInterrupt: The user typed Ctrl-C. All workers have ended.
    """
    if not callable(fn):
        raise UsageError(f"{fn!r} cannot be called: give the function that the workers call")
    return run_packed_call(cluster, pack_call(fn, args, kwargs, is_same_machine=False), options, memory)


def run_packed_call(
    cluster: Cluster, call: bytes, options: RunOptions, memory: JobMemory | None = None
) -> list[Any]:
    """Run a call that `pack_call` has packed for another machine, as `run_function` does."""
    options = _checked(options)
    if options.min_num_proc is None and options.num_proc < 1:
        raise UsageError(f"num_proc={options.num_proc} is invalid: expected a whole number above 0")
    least = options.num_proc if options.min_num_proc is None else options.min_num_proc
    if not 1 <= least <= options.num_proc:
        raise UsageError(
            f"min_num_proc={least} is invalid with num_proc={options.num_proc}: expected 1 <= min_num_proc <= num_proc"
        )
    claim_standard_streams()
    config = _config(options)
    is_secret = _is_secret(config.worker.environment)
    if options.mpi_options is not None:
        cluster = _with_mpi(cluster, config, options, is_secret)
    with ExitStack() as stack:
        placement = TaskAgents(cluster, config, options, call, is_secret=is_secret, memory=memory)
        driver = Driver(placement, own_environment(), stack, (options.stdout, options.stderr))
        end = driver.run()
        driver.show_rest()
        if end.exit_code:
            if memory is not None:
                memory.collect_from(placement.store)
            _raise(end, placement, options)
        return _results(placement.store, least, options.num_proc)


def interface_names(nics: Sequence[str] | str | None) -> str | None:
    """Return the names of network interfaces as `RunOptions.interface` has them, None for none."""
    return nics if isinstance(nics, str) else ",".join(nics or ()) or None


def start_timeout_ns(*given: float | None) -> int:
    """Return the largest of the times that are given, in seconds; the default if none is. Raises UsageError."""
    seconds = [timeout for timeout in given if timeout is not None] or [START_TIMEOUT_S]
    for each in seconds:
        if not isinstance(each, Real) or not 0 < each < math.inf:
            raise UsageError(f"start_timeout={each!r} is invalid: expected a number of seconds above 0")
    return int(max(seconds) * SECOND)


def _checked(options: RunOptions) -> RunOptions:
    """Return the options with plain integers. Raises UsageError for values of wrong types, which callers may give."""
    for name, value in options.environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"the environment has a variable {name!r}: expected a name without '='")
        if not isinstance(value, str) or "\0" in value:
            kind = "a null byte" if isinstance(value, str) else f"type {type(value).__name__}"
            raise UsageError(f"the environment's variable {name} has {kind}: expected an ordinary string")
    for name, stream in (("stdout", options.stdout), ("stderr", options.stderr)):
        is_binary = isinstance(stream, (io.RawIOBase, io.BufferedIOBase))
        if stream is not None and (is_binary or not callable(getattr(stream, "write", None))):
            raise UsageError(f"{name}={stream!r} takes no text: expected a file that is open for text")
    port = _whole("driver_port", options.driver_port)
    if not 0 <= port < LAST_PORT:
        raise UsageError(
            f"driver_port={port} is invalid: expected 1 to {LAST_PORT - 1}, because the next port is taken, too"
        )
    least = options.min_num_proc
    return replace(
        options,
        num_proc=_whole("num_proc", options.num_proc),
        driver_port=port,
        min_num_proc=None if least is None else _whole("min_num_proc", least),
    )


def _whole(name: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(f"{name}={number!r} is invalid: expected an integer") from None


def _config(options: RunOptions) -> LaunchConfig:
    environment = {**settings_that_travel(own_environment()), **options.environment}
    if options.encrypts:
        environment[PROTECTION_VARIABLE] = SECRET
    if options.mpi_options is not None:
        environment.setdefault(BACKENDS_VARIABLE, "mpi")
    outputs = Outputs(prefix=options.prefix, timestamps=options.has_timestamps)
    worker = WorkerSpec(
        argv=(),
        environment=environment,
        exported=frozenset(environment),
        preload=(),
        max_restarts=options.max_restarts,
    )
    rendezvous = RendezvousConfig(start_timeout_ns=options.start_timeout_ns)
    return LaunchConfig(
        worker,
        rendezvous,
        outputs,
        interface=options.interface,
        start_timeout_ns=options.start_timeout_ns,
    )


def _with_mpi(cluster: Cluster, config: LaunchConfig, options: RunOptions, is_secret: bool) -> Cluster:
    """Return the cluster whose tasks mpirun starts in the slots of this one."""
    if options.min_num_proc is not None:
        raise UsageError("an elastic job cannot use MPI, whose ranks end together: leave use_mpi out")
    if options.driver_port:
        raise UsageError(
            "a driver behind a NAT cannot use MPI, whose daemons connect to any port of this machine: leave use_mpi out"
        )
    if is_secret:
        raise UsageError(
            "a job with encrypted connections cannot use MPI, which sends tensors in the clear: leave out use_mpi or "
            "the encryption"
        )
    from ronde.launch.mpi.mpi_cluster import MpiCluster  # only such jobs need it

    mpirun_options = options.mpi_options or ()
    return MpiCluster(cluster, config, mpirun_options, options.first_host, options.driver_address)


def _is_secret(environment: Mapping[str, str]) -> bool:
    text = environment.get(PROTECTION_VARIABLE, "").strip()
    return bool(text) and PROTECTION.read(text, f"{PROTECTION_VARIABLE}={text!r}") == SECRET


def _results(store: Store, least: int, most: int) -> list[Any]:
    """Return the results by rank. An elastic job may end with fewer than `most`."""
    results: list[Any] = []
    for rank in range(most):
        file = fetch_result(store, rank)
        if file is None and rank >= least:
            break
        if file is None:
            raise WorkerError(f"rank {rank} ended without a result: its agent could not send it", rank)
        with file:
            results.append(load_result(file, rank))
    return results


def _raise(end: JobEnd, placement: TaskAgents, options: RunOptions) -> NoReturn:
    """Raise the exception that a failed job means for the caller."""
    if end.failure is not None:
        raise _worker_error(end.failure, placement.store)
    if end.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if placement.has_missed_start:
        raise TimeoutError(end.reason, operation="start", waited_ns=options.start_timeout_ns)
    if end.exit_code == USAGE_ERROR:
        raise UsageError(end.reason)
    raise WorkerError(end.reason, exit_code=end.exit_code, has_lost_task=placement.has_lost_task)


def _worker_error(failure: Failure, store: Store) -> WorkerError:
    with ExitStack() as stack:
        file = fetch_result(store, failure.rank) if failure.exit_code == 1 else None
        if file is not None:
            stack.enter_context(file)
        return worker_error(failure, file, place=f" on {failure.host}")
