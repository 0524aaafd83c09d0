"""Python functions as workers: `ronde.run(fn, np=4)`, from a script or a notebook.

The launcher's agent starts processes (`callable_worker.py`) that unpickle the function and its arguments and call it
(`calls`). It supervises them like other workers.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ronde.environment import environment as own_environment
from ronde.errors import UsageError, WorkerError
from ronde.foreign_names import other_names
from ronde.launch import calls
from ronde.launch.agent.agent import RunResult, run_agent
from ronde.launch.calls import CallFiles, load_result, pack_call, worker_error
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.templates.preload import LATER, WORTH_IT
from ronde.rendezvous.membership import Failure

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["ElasticLaunch", "run"]

P = ParamSpec("P")
R = TypeVar("R")

_SIGNALS = {128 + signum: signum for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
INTERRUPTED = 128 + signal.SIGINT


@other_names(num_proc="np", env="environment", on="cluster")
def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    environment: Mapping[str, str] | None = None,
    start_method: str = "spawn",
    cluster: Cluster | str | None = None,
    use_mpi: bool = False,
) -> list[R]:
    """Call `fn(*args, **kwargs)` in `np` new processes, the ranks of a job, and return a list of their results by rank.

        results = ronde.run(train, (10,), np=4)

    Output of the ranks appears here, prefixed by the rank. Ctrl-C ends all of them.

    Args:
        fn: a function of a module; with cloudpickle installed, any function.
        args: positional arguments, the same for all ranks (default: none).
        kwargs: keyword arguments, the same for all ranks (default: none).
        np: the number of processes (default: 1).
        environment: variables for the processes, which override this process's, except those of rank and size.
        start_method: "spawn" starts new processes; "forkserver" forks them from one process that has imported the large
            modules of this one (default: "spawn").
        cluster: where to start the processes: a cluster, or the name under which a package has registered one, such as
            "ray" (default: on this machine). See docs/adding-a-cluster.md.
        use_mpi: on a cluster, start the processes by Open MPI's `mpirun`, with MPI as their backend (default: false).

    Raises:
        WorkerError: a rank failed: `.rank`, `.host`, `.exit_code`, `.traceback_text`, `.last_lines`, and
            `.exit_codes` of all that failed. All ranks have ended.
        UsageError: an argument is invalid, or the function cannot be sent to other processes.
    """
    if np < 1:
        raise UsageError(f"ronde.run(np={np}) is invalid: expected a whole number above 0")
    if cluster is not None:
        return _run_on_cluster(cluster, fn, args, kwargs or {}, np, environment or {}, use_mpi)
    if use_mpi:
        raise UsageError("use_mpi=True needs a cluster: on this machine, use `ronde run --launcher mpi`")
    worker = WorkerSpec(argv=(), slots=np, environment=environment or {})
    launch = ElasticLaunch(LaunchConfig(worker), fn, start_method=start_method)
    results = launch._call(args, kwargs or {})
    return [results[rank] for rank in sorted(results)]


def _run_on_cluster(
    cluster: Cluster | str,
    fn: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    workers: int,
    environment: Mapping[str, str],
    use_mpi: bool,
) -> list[R]:
    from ronde.launch.clusters.cluster import registered_cluster  # only such jobs need these
    from ronde.launch.driver.functions import run_function
    from ronde.launch.job_options import RunOptions

    if isinstance(cluster, str):
        cluster = registered_cluster(cluster)
    options = RunOptions(workers, env=environment, mpi_options=() if use_mpi else None)
    return run_function(cluster, fn, args, kwargs, options)


class ElasticLaunch(Generic[P, R]):
    """Calls a function in the workers of a job that `config` describes, as torch's `elastic_launch` does.

    `ElasticLaunch(config, fn)(*args)` returns the results of this node's workers by rank, and raises as `run`.

    Args:
        config: The job. Its command is not used.
        fn: A function that can be pickled.
        start_method: How workers start, as of `multiprocessing`: "spawn" (default) or "forkserver".
        python: The Python that runs spawned workers (default: that of this process).

    Raises:
        UsageError: `fn` is not callable, the job has no workers, or `start_method` is another one.
    """

    def __init__(
        self,
        config: LaunchConfig,
        fn: Callable[P, R],
        *,
        start_method: str = "spawn",
        python: str | None = None,
    ) -> None:
        if not callable(fn):
            raise UsageError(f"{fn!r} is not callable: to run a command, use ronde.cli.main(['run', ...])")
        if config.worker.slots < 1:
            raise UsageError(f"{config.worker.slots} workers requested: expected at least 1")
        if start_method not in ("spawn", "forkserver"):
            raise UsageError(
                f"start_method={start_method!r} is invalid: expected 'spawn' or 'forkserver' ('fork' would "
                "copy the locks and open connections of this process)"
            )
        self._config = config
        self._fn = fn
        self._start_method = start_method
        self._python = python or sys.executable

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> dict[int, R]:
        """Run the job; return the results by rank."""
        return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, R]:
        if calls.is_preparing:
            raise UsageError(
                "a worker imports this script, and so would start workers of its own: call ronde.run() under "
                '`if __name__ == "__main__":`, or install cloudpickle'
            )
        if not self._python:
            raise UsageError("there is no Python to run workers with: sys.executable is empty")
        packed = pack_call(self._fn, args, kwargs)
        with ExitStack() as stack:
            files = CallFiles(stack, [packed], self._config.worker.slots)
            del packed
            argv = files.command(self._python)
            worker = replace(self._config.worker, argv=argv, fork=self._start_method == "forkserver")
            if worker.preload is None:
                worker = replace(worker, preload=_loaded_here())
            result = run_agent(
                replace(self._config, worker=worker), own_environment(), keep=files.fds, report=False
            )
            if result.exit_code != 0:
                _raise(result, files)
            results = {}
            for number, rank in enumerate(sorted(result.returncodes)):
                with files.open_result(number) as file:
                    results[rank] = load_result(file, rank)
            return results


def _loaded_here() -> tuple[str, ...]:
    """Return the modules for a template: those that `callable_worker.py` needs and those that the function may use."""
    return ("multiprocessing.spawn", __name__, *(name for name in (*WORTH_IT, *LATER) if name in sys.modules))


def _raise(result: RunResult, files: CallFiles) -> None:
    """Raise the exception that a failed job means for the caller."""
    failure = next(iter(result.failures.values()), None)
    if failure is not None:
        raise _worker_error(result, failure, files)
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if result.exit_code in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[result.exit_code])  # as if the signal had come to this process
    raise WorkerError(result.reason, exit_code=result.exit_code)


def _worker_error(result: RunResult, failure: Failure, files: CallFiles) -> WorkerError:
    codes = {rank: each.exit_code for rank, each in result.failures.items()}
    ours = sorted(result.returncodes)
    if failure.rank not in ours:
        return worker_error(failure, None, codes)
    with files.open_result(ours.index(failure.rank)) as file:
        return worker_error(failure, file, codes)
