"""Runs a Python function in tasks of a cluster, one worker in each, and returns its results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, NoReturn

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
from ronde.launch.job_options import RunOptions
from ronde.launch.screen import claim_standard_streams
from ronde.net.authentication import SECRET
from ronde.rendezvous.membership import Failure
from ronde.stores.store import Store
from ronde.values import PROTECTION

__all__ = ["call_on_hosts", "run_function", "run_packed_call"]

PROTECTION_VARIABLE = "RONDE_PROTECTION"
BACKENDS_VARIABLE = "RONDE_BACKENDS"
USAGE_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT


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
        return _results(placement.store, options.least, options.num_proc)


def call_on_hosts(
    config: LaunchConfig, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in the workers of a job as of `ronde run -H`; return the results by rank.

    All hosts of `config` find the caller's files at the same paths. Raises as `run_function`.
    """
    from ronde.launch.hosts.host_agents import HostAgents  # only such jobs need it

    claim_standard_streams()
    environment = own_environment()
    with ExitStack() as stack:
        placement = HostAgents(config, environment, pack_call(fn, args, kwargs))
        driver = Driver(placement, environment, stack)
        end = driver.run()
        driver.show_rest()
        if end.exit_code:
            _raise_end(end, placement.store)
        return _results(placement.store, placement.limits.min_slots, None)


def _config(options: RunOptions) -> LaunchConfig:
    environment = {**settings_that_travel(own_environment()), **(options.env or {})}
    if options.encrypt:
        environment[PROTECTION_VARIABLE] = SECRET
    if options.mpi_options is not None:
        environment.setdefault(BACKENDS_VARIABLE, "mpi")
    outputs = Outputs(prefix=options.prefix, timestamps=options.prefix_output_with_timestamp)
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


def _results(store: Store, least: int, most: int | None) -> list[Any]:
    """Return the results by rank. An elastic job may end with fewer than `most` (None: any number)."""
    results: list[Any] = []
    for rank in count() if most is None else range(most):
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
    is_known = end.failure is not None or end.exit_code == INTERRUPTED
    if placement.has_missed_start and not is_known:
        raise TimeoutError(end.reason, operation="start", waited_ns=options.start_timeout_ns)
    is_known = is_known or end.exit_code == USAGE_ERROR
    _raise_end(end, placement.store, has_lost_task=not is_known and placement.has_lost_task)


def _raise_end(end: JobEnd, store: Store, has_lost_task: bool = False) -> NoReturn:
    if end.failure is not None:
        raise _worker_error(end.failure, store)
    if end.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if end.exit_code == USAGE_ERROR:
        raise UsageError(end.reason)
    raise WorkerError(end.reason, exit_code=end.exit_code, has_lost_task=has_lost_task)


def _worker_error(failure: Failure, store: Store) -> WorkerError:
    """Return the error of a job that a worker's failure has ended, with what the worker has left in the store."""
    with ExitStack() as stack:
        file = fetch_result(store, failure.rank) if failure.exit_code == 1 else None
        if file is not None:
            stack.enter_context(file)
        return worker_error(failure, file, place=f" on {failure.host}")
