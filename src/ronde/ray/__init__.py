"""Ronde on Ray: `RayExecutor` runs functions in workers on a Ray cluster. Needs `pip install 'ronde[ray]'`.

It has the names of Horovod's executor. See docs/ray.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ronde.errors import RondeError, UnsupportedError, UsageError
from ronde.foreign_names import other_names
from ronde.launch.calls import check_arguments
from ronde.launch.clusters.platforms import needs_package
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.driver.functions import run_function
from ronde.launch.driver.job_store import reachable_by_tasks
from ronde.launch.job_options import RunOptions
from ronde.net.authentication import secrecy_is_wanted
from ronde.process.exceptions import described
from ronde.ray.worker_calls import INTERRUPTED, SHUT_DOWN, CallServer, WorkerCall, fetch_result, serve_calls

with needs_package("ray", "ray"):
    import ray
    from ray.util.placement_group import get_current_placement_group

    from ronde.ray.cluster import Placing, RayCluster

__all__ = ["Placing", "RayCluster", "RayExecutor", "RaySettings"]

R = TypeVar("R")
LAST_CALL_NS = 10**9 // 2  # for workers to end the calls that they are in, at a shutdown
END_S = 5.0  # for workers that are in no call to end, before their tasks are killed


@dataclass(frozen=True)
class RaySettings:
    """What `RayExecutor.create_settings` returns: how long a start may take, and how processes connect.

    Attributes:
        timeout_s: the time for the workers to register once Ray has room for them, in seconds (default: 30).
        placement_group_timeout_s: the time for Ray to find room for them, in seconds (default: 100).
        nics: the names of the network interfaces by which hosts may reach each other (default: Ronde finds them).
        verbose: 0 for no messages about the start (default: 1).
        encrypt: encrypt all connections of the job, also those with tensors (default: false).
        require_encrypted_rpc: raise UsageError if Ray would send the job's key unencrypted to another host, instead of
            a warning (default: false).
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: Sequence[str] | str | None = None
    verbose: int = 1
    encrypt: bool = False
    require_encrypted_rpc: bool = False


class RayExecutor:
    """Workers on a Ray cluster that run until `shutdown`: start them once, then call functions in them.

        executor = RayExecutor(num_workers=4)
        executor.start()
        losses = executor.run(train, args=[10])  # by rank
        executor.shutdown()

    If a function fails in a worker, a worker dies or a Ray node is lost, all workers end, and the waiting call and
    later ones raise WorkerError. `start` then starts new ones.

    With `min_workers` the job is elastic: each `run` starts new workers, continues with fewer when some are lost, and
    adds new ones. The other methods that call functions need a fixed number of workers.

    One thread at a time may use an executor.

    Args:
        settings: what `create_settings` returns (default: its defaults).
        num_workers: the number of workers, on as few hosts as possible.
        num_hosts, num_workers_per_host: instead: the number of hosts, and of workers on each (default: 1).
        cpus_per_worker: CPUs that Ray reserves for each worker (default: 1).
        use_gpu, gpus_per_worker: whether Ray reserves GPUs for each worker, and how many (default: none; 1).
        use_current_placement_group: in a Ray task or actor with a placement group, run in that group (default: true).
        min_workers, max_workers: the smallest number of workers with which an elastic job runs, and the largest
            (default: all slots of the Ray cluster).
        reset_limit: how often an elastic job may start its workers again because one has failed (default: 20).
        elastic_timeout: the time for an elastic job to have `min_workers`, at the start and after a loss, in seconds
            (default: 600; the times of the settings apply if they are longer).
        cooldown_range, override_discovery: have no effect; scripts for Horovod may set them.

    Raises:
        UsageError: the numbers contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | str | None = None,
        *,
        verbose: int = 1,
        encrypt: bool = False,
        require_encrypted_rpc: bool = False,
    ) -> RaySettings:
        """Return settings for a `RayExecutor`.

        Args:
            timeout_s: the time for the workers to register once Ray has room for them, in seconds (default: 30).
            placement_group_timeout_s: the time for Ray to find room for them, in seconds (default: 100).
            nics: the names of the network interfaces by which hosts may reach each other (default: Ronde finds them).
            ssh_identity_file, ssh_str: have no effect, because Ray starts the workers.
            verbose: 0 for no messages about the start (default: 1).
            encrypt: encrypt all connections of the job, also those with tensors (default: false).
            require_encrypted_rpc: raise UsageError if Ray would send the job's key unencrypted to another host, instead
                of a warning (default: false).

        Raises:
            Nothing: `start` checks the settings.
        """
        return RaySettings(
            timeout_s,
            placement_group_timeout_s,
            nics,
            verbose=verbose,
            encrypt=encrypt,
            require_encrypted_rpc=require_encrypted_rpc,
        )

    @other_names(np="num_workers", num_proc="num_workers")
    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_worker is not None and not (use_gpu and gpus_per_worker >= 1):
            raise UsageError(
                f"gpus_per_worker={gpus_per_worker} with use_gpu={use_gpu}: expected at least 1, and use_gpu=True"
            )
        if sum(number is not None for number in (num_workers, num_hosts, min_workers)) != 1:
            raise UsageError(
                f"num_workers={num_workers}, num_hosts={num_hosts}, min_workers={min_workers}: expected one of them"
            )
        self.settings = settings or self.create_settings()
        gpus = (gpus_per_worker or 1) if use_gpu else 0
        if num_hosts:
            num_workers = num_hosts * num_workers_per_host
            self._placing = Placing(cpus_per_worker, gpus, num_workers_per_host, "STRICT_SPREAD")
        else:
            self._placing = Placing(cpus_per_worker, gpus)
        self.num_workers, self.min_workers, self.max_workers = num_workers, min_workers, max_workers
        self._reset_limit, self._elastic_timeout = reset_limit, elastic_timeout
        self._uses_current_group = use_current_placement_group
        self._environment: dict[str, str] = {}
        self._job: _Job | None = None

    @other_names(env="extra_env_vars", environment="extra_env_vars")
    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, and return when they are ready. Those of an elastic job start with each `run`.

        Args:
            executable_cls: a class, or a function, that makes one object in each worker, which `execute` passes to its
                functions (default: none).
            executable_args, executable_kwargs: arguments for this class (default: none).
            extra_env_vars: variables for the environment of the workers (default: none).

        Raises:
            TimeoutError: Ray has no room for the workers within the time of the settings.
            WorkerError: a worker failed, for example because the class raised an exception.
            UsageError: this executor has been started already, or `ray.init()` has not been called.
        """
        if self._job and not self._job.has_ended():
            raise UsageError("this RayExecutor has been started already: call shutdown() first")
        self.shutdown()
        if not ray.is_initialized():
            raise UsageError("this process is not connected to a Ray cluster: call ray.init() first")
        self._environment = dict(extra_env_vars or {})
        if self.num_workers is None:
            if executable_cls:
                raise UnsupportedError(
                    "an elastic RayExecutor has no executables: use run() without executable_cls"
                )
            return
        args, kwargs = tuple(executable_args or ()), dict(executable_kwargs or {})
        maker = partial(executable_cls, *args, **kwargs) if executable_cls else _no_executable
        self._job = _Job(self._cluster(), maker, self._options(self.num_workers))
        try:
            self._results(0, range(self.num_workers))
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[R]:
        """Call `fn(*args, **kwargs)` in all workers; return the results by rank.

        Args:
            fn: any function that cloudpickle can send.
            args, kwargs: its arguments, the same for all workers (default: none).

        Raises:
            WorkerError: a worker failed. All workers have ended.
            UsageError: the function cannot be sent, or `start` has not been called.
        """
        if self.num_workers is None:
            return self._run_elastic(fn, args or (), kwargs or {})
        check_arguments("fn", args or (), kwargs or {})
        number = self._started().calls.call(WorkerCall(fn, tuple(args or ()), dict(kwargs or {})))
        return self._results(number, range(self.num_workers))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[ray.ObjectRef[Any]]:
        """Call `fn(*args, **kwargs)` in all workers; return at once a list of Ray references to the results, by rank.

        Workers execute calls in the order in which you make them. The references are valid until `shutdown`.

        Args:
            fn: any function that cloudpickle can send.
            args, kwargs: its arguments, the same for all workers (default: none).

        Raises:
            UsageError: the function cannot be sent, or `start` has not been called. (`ray.get` of a reference raises
                the other errors of `run`.)
        """
        calls = self._started().calls
        check_arguments("fn", args or (), kwargs or {})
        number = calls.call(WorkerCall(fn, tuple(args or ()), dict(kwargs or {})))
        fetch = ray.remote(num_cpus=0, max_retries=0)(fetch_result)
        return [fetch.remote(calls.line, number, rank) for rank in range(self.num_workers or 0)]

    def execute(self, fn: Callable[[Any], R]) -> list[R]:
        """Call `fn(executable)` in all workers, with the object that each made at the start; return as `run`.

        Args:
            fn: any function that cloudpickle can send.

        Raises:
            WorkerError, UsageError: as of `run`.
        """
        number = self._started().calls.call(WorkerCall(fn, takes_executable=True))
        return self._results(number, range(self.num_workers or 0))

    def execute_single(self, fn: Callable[[Any], R]) -> R:
        """Call `fn(executable)` in the worker of rank 0 only; return its result.

        Args:
            fn: any function that cloudpickle can send.

        Raises:
            WorkerError, UsageError: as of `run`.
        """
        number = self._started().calls.call(WorkerCall(fn, takes_executable=True, rank=0))
        result: R = self._results(number, [0])[0]
        return result

    def shutdown(self) -> None:
        """End the workers. A second call does nothing.

        A call that does not end within half a second raises RondeError in the thread that waits for its results. Raises
        nothing.
        """
        job, self._job = self._job, None
        if job:
            job.shut_down()

    def _started(self) -> _Job:
        if self.num_workers is None:
            raise UnsupportedError("an elastic RayExecutor has workers only during run(): use run()")
        if self._job is None:
            raise UsageError("this RayExecutor has no workers: call start() first")
        return self._job

    def _results(self, number: int, ranks: Sequence[int]) -> list[Any]:
        job = self._started()
        try:
            return job.calls.results(number, ranks)
        except KeyboardInterrupt:
            job.calls.end(RondeError(INTERRUPTED))
            job.kill_workers()
            raise
        except BaseException:
            job.kill_workers()
            raise

    def _run_elastic(self, fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[R]:
        cluster = self._cluster()
        capacity = cluster.capacity()
        least = self.min_workers or 1
        most = self.max_workers or max(least, capacity.total if capacity else least)
        return run_function(cluster, fn, args, kwargs, self._options(most, least))

    def _cluster(self) -> RayCluster:
        group = get_current_placement_group() if self._uses_current_group else None
        return RayCluster(self._placing, group, self.settings.require_encrypted_rpc)

    def _options(self, num_proc: int, min_num_proc: int | None = None) -> RunOptions:
        settings = self.settings
        return RunOptions(
            num_proc=num_proc,
            min_num_proc=min_num_proc,
            start_timeout=settings.timeout_s + settings.placement_group_timeout_s,
            elastic_timeout=None if min_num_proc is None else self._elastic_timeout,
            reset_limit=self._reset_limit,
            env=self._environment,
            verbose=settings.verbose,
            nics=settings.nics,
            encrypt=settings.encrypt,
        )


def _no_executable() -> None:
    return None


class _Job:
    """The workers between `start` and `shutdown`, and the thread of their driver.

    After a failure, it keeps the error for the calls that wait for results.
    """

    def __init__(self, cluster: RayCluster, make_executable: Callable[[], Any], options: RunOptions) -> None:
        self._cluster = cluster
        config = LaunchConfig(WorkerSpec(argv=()), interface=options.interface)
        is_secret = options.encrypt or secrecy_is_wanted()
        self._ranks = range(options.num_proc)
        self.calls = CallServer(*reachable_by_tasks(config), is_secret)
        self._thread = threading.Thread(
            target=self._drive, args=(make_executable, options), name="ronde-executor", daemon=True
        )
        self._thread.start()

    def has_ended(self) -> bool:
        """Return whether all workers have ended."""
        return not self._thread.is_alive()

    def shut_down(self) -> None:
        """Let the workers end, and kill those that are in a call."""
        if not self.has_ended():
            self.calls.call(None)
            if self.calls.are_ending(self._ranks, LAST_CALL_NS):
                self._thread.join(END_S)
            self.calls.end(RondeError(SHUT_DOWN))
            self.kill_workers()
        self.calls.close()

    def kill_workers(self) -> None:
        """Kill the workers that have not ended."""
        if not self.has_ended():
            self._cluster.cancel("the RayExecutor is shut down")
            self._thread.join()

    def _drive(self, make_executable: Callable[[], Any], options: RunOptions) -> None:
        try:
            run_function(self._cluster, serve_calls, (self.calls.line, make_executable), {}, options)
            self.calls.end(RondeError(SHUT_DOWN))
        except RondeError as error:
            self.calls.end(error)
        except BaseException as error:  # such as KeyboardInterrupt, if the workers were interrupted
            self.calls.end(RondeError(f"the workers of the RayExecutor have ended: {described(error)}"))
