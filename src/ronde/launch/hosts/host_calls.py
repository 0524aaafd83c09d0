"""Calls a Python function in the workers of a job on hosts, as `ronde run -H` runs a command there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ronde.errors import UsageError, WorkerError
from ronde.launch.calls import pack_call
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.functions import failed_worker_error, results_of_job
from ronde.launch.hosts.host_agents import HostAgents
from ronde.launch.screen import claim_standard_streams

__all__ = ["call_on_hosts"]

USAGE_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT


def call_on_hosts(
    config: LaunchConfig,
    environment: Mapping[str, str],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in the workers of the job that `config` describes; return the results by rank.

    All hosts find the caller's files at the same paths, as those of `ronde run -H`. `environment`: the whole one of
    this process. Raises WorkerError, UsageError and KeyboardInterrupt as `ronde.run`.
    """
    claim_standard_streams()
    with ExitStack() as stack:
        placement = HostAgents(config, environment, pack_call(fn, args, kwargs))
        driver = Driver(placement, environment, stack)
        end = driver.run()
        driver.show_rest()
        if end.failure is not None:
            raise failed_worker_error(end.failure, placement.store)
        if end.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if end.exit_code == USAGE_ERROR:
            raise UsageError(end.reason)
        if end.exit_code:
            raise WorkerError(end.reason, exit_code=end.exit_code)
        return results_of_job(placement.store, placement.limits.min_slots, None)
