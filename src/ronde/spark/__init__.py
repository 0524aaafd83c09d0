"""Ronde on Spark: `run` calls a function in workers on the executors. Needs `pip install 'ronde[spark]'`.

See docs/spark.md.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, TextIO, TypeVar

from ronde.errors import UsageError
from ronde.foreign_names import other_names
from ronde.launch.clusters.cluster import Cluster
from ronde.launch.clusters.platforms import needs_package
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions

with needs_package("pyspark", "spark"):
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile

    from ronde.spark.cluster import SparkCluster

__all__ = [
    "RunStore",
    "SparkBackend",
    "SparkCluster",
    "TorchEstimator",
    "TorchModel",
    "active_cluster",
    "run",
    "run_elastic",
]
_ESTIMATOR = {  # loaded when first used: it needs PyTorch
    "RunStore": "ronde.parquet.store",
    "SparkBackend": "ronde.spark.torch_estimator",
    "TorchEstimator": "ronde.spark.torch_estimator",
    "TorchModel": "ronde.spark.torch_model",
}

R = TypeVar("R")


@other_names(np="num_proc", environment="env")
def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    prefix: str | None = None,
    resources: ResourceProfile | None = None,
    encrypt: bool = False,
    require_encrypted_rpc: bool = False,
    extra_mpi_args: str | None = None,
) -> list[R]:
    """Call `fn(*args, **kwargs)` in new processes on the executors, the ranks of a job; return the results by rank.

        results = ronde.spark.run(train, (10,), num_proc=4)

    Each rank occupies a Spark task while it runs. Any thread may call this, several at once. Ctrl-C ends the job.

    Args:
        fn: Any function that cloudpickle can send. The executors need Ronde and the modules that it imports.
        args: Positional arguments, the same for all ranks (default: none).
        kwargs: Keyword arguments, the same for all ranks (default: none).
        num_proc: The number of ranks (default: `spark.default.parallelism`, or the number of the executors' cores).
        start_timeout: The time for all ranks to get a Spark task, in seconds (default: 600).
        env: Variables for the ranks, which override those of the executors (default: none).
        stdout: Takes the output of the ranks (default: `sys.stdout`).
        stderr: Takes their errors and the messages of the driver (default: `sys.stderr`).
        verbose: 0 for no messages about the start (default: 1).
        nics: The names of the network interfaces by which hosts may reach each other (default: Ronde finds them).
        use_mpi: Start the ranks by Open MPI's `mpirun`, and use MPI (default: false). See docs/spark.md, section MPI.
        use_gloo: Ignored without `use_mpi`: a script for Horovod may set it.
        prefix_output_with_timestamp: Begin each line of output with the time (default: false).
        executable: The Python that runs the ranks (default: that of the executors).
        prefix: The text before each line of output, with {rank}, {host} and {stream} (default: `[host:rank]`).
        resources: What each Spark task needs, such as GPUs (default: what `spark.task.*` says).
        encrypt: Encrypt all connections of the job, also those with tensors (default: false).
        require_encrypted_rpc: Raise UsageError, not warn, if Spark would send the key unencrypted (default: false).
        extra_mpi_args: Further options of `mpirun`, for `use_mpi` (default: none).

    Raises:
        WorkerError: A rank failed (`.rank`, `.host`, `.traceback_text`), or its task was lost. All ranks have ended.
        TimeoutError: Spark had too few free slots within `start_timeout`.
        UsageError: An argument is invalid, the function cannot be sent, or there is no Spark session.
    """
    cluster = _cluster(False, resources, require_encrypted_rpc)
    options = RunOptions(
        num_proc=_default_number(cluster) if num_proc is None else num_proc,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        prefix=prefix,
        executable=executable,
        encrypt=encrypt,
        mpi_options=_mpi_options(use_mpi, use_gloo, extra_mpi_args),
    )
    return _run(cluster, fn, args, kwargs, options)


@other_names(np="num_proc", environment="env")
def run_elastic(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    *,
    prefix: str | None = None,
    resources: ResourceProfile | None = None,
    encrypt: bool = False,
    require_encrypted_rpc: bool = False,
) -> list[R]:
    """Call `fn` as `run` does, and continue while executors come and go; return the results of the last ranks.

        results = ronde.spark.run_elastic(train, min_num_proc=2, max_num_proc=8)

    When a rank is lost or a new one comes, all ranks start again, and the function should resume from what it has saved
    (`ronde.Checkpoints`). Each rank is a Spark job of one task, so dynamic allocation works.

    Args:
        fn, args, kwargs: As of `run`.
        num_proc: The number of ranks wanted, if `max_num_proc` is not given (default: as of `run`).
        min_num_proc: The smallest number of ranks with which the job runs (default: `num_proc`).
        max_num_proc: The largest number of ranks (default: `num_proc`).
        start_timeout: The time for `min_num_proc` ranks to get Spark tasks, in seconds (default: 600).
        elastic_timeout: The same after a loss (default: `start_timeout`); the larger of both applies.
        reset_limit: How often the ranks may start again after a rank has failed (default: 20).
        env, stdout, stderr, verbose, nics, prefix_output_with_timestamp: As of `run`.
        prefix, resources, encrypt, require_encrypted_rpc: As of `run`.

    Raises:
        WorkerError: A rank failed too often.
        TimeoutError: Fewer than `min_num_proc` ranks had Spark tasks for `start_timeout`.
        UsageError: As of `run`.
    """
    cluster = _cluster(True, resources, require_encrypted_rpc)
    wanted = num_proc or max_num_proc or _default_number(cluster)
    options = RunOptions(
        num_proc=max_num_proc or wanted,
        min_num_proc=min_num_proc or wanted,
        start_timeout=start_timeout,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        prefix=prefix,
        encrypt=encrypt,
    )
    return _run(cluster, fn, args, kwargs, options)


def _run(
    cluster: Cluster,
    fn: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: RunOptions,
) -> list[R]:
    if isinstance(cluster, SparkCluster):
        address, port = cluster.driver_address()
        options = replace(options, driver_address=address, driver_port=port)
    try:
        return run_function(cluster, fn, args, kwargs or {}, options)
    finally:
        cluster.cancel("the function has ended")


def active_cluster() -> Cluster:
    """Return the cluster of the active Spark session, for `ronde.run(..., cluster="spark")` and the like.

    Raises:
        UsageError: there is no Spark session.
    """
    return _cluster(False, None, False)


def _cluster(is_elastic: bool, resources: ResourceProfile | None, requires_encryption: bool) -> Cluster:
    """Return the cluster of the present session, of Spark Connect or classic."""
    connect = sys.modules.get("pyspark.sql.connect.session")
    session = connect.SparkSession.getActiveSession() if connect else None
    if session is not None:
        from ronde.spark.connect_cluster import ConnectCluster  # which needs more packages

        return ConnectCluster(session, requires_encryption)
    context = SparkContext._active_spark_context
    if context is None:
        raise UsageError("there is no Spark session: create one by SparkSession.builder.getOrCreate()")
    return SparkCluster(context, is_elastic, resources, requires_encryption)


def __getattr__(name: str) -> Any:
    if name in _ESTIMATOR:
        from ronde.data.needs import need  # only the estimator needs it

        need("torch", extra="spark-estimator")  # with an error that says how to install it
        return getattr(import_module(_ESTIMATOR[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _default_number(cluster: Cluster) -> int:
    if isinstance(cluster, SparkCluster):
        return cluster.parallelism
    raise UsageError("num_proc is missing: Spark Connect does not report the number of slots")


def _mpi_options(use_mpi: bool | None, use_gloo: bool | None, given: str | None) -> list[str] | None:
    """Return the options of mpirun, None for a job without MPI."""
    if use_mpi and use_gloo:
        raise UsageError("use_mpi=True and use_gloo=True contradict each other: leave one of them out")
    if given and not use_mpi:
        raise UsageError(
            f"extra_mpi_args={given!r} has no effect without use_mpi=True: add that, or leave it out"
        )
    return shlex.split(given or "") if use_mpi else None
