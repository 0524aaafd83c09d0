"""Ronde on Dask: `run` calls a function in workers on a Dask cluster. Needs `pip install 'ronde[dask]'`.

See docs/dask.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from ronde.errors import UsageError
from ronde.foreign_names import other_names
from ronde.launch.clusters.platforms import needs_package
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions

with needs_package("distributed", "dask"):
    from distributed import Client, default_client

    from ronde.dask.cluster import DaskCluster

__all__ = ["DaskCluster", "default_cluster", "run"]

R = TypeVar("R")


@other_names(np="num_proc", environment="env")
def run(
    client: Client,
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    encrypt: bool = False,
    require_encrypted_rpc: bool = False,
) -> list[R]:
    """Call `fn(*args, **kwargs)` in new processes on a Dask cluster, the ranks of a job; return the results by rank.

        results = ronde.dask.run(Client(address), train, (10,), num_proc=4)

    Each rank occupies one thread of a Dask worker while it runs. Any thread may call this, several at once.

    Args:
        client: a client of the cluster that is not asynchronous.
        fn: any function that cloudpickle can send; the workers need Ronde and the modules that it imports.
        args: positional arguments, the same for all ranks (default: none). Futures of the client among them, also in
            lists, tuples, sets and dictionaries, are replaced by their results, as by `client.submit`.
        kwargs: keyword arguments, the same for all ranks (default: none). As for `args`, results replace futures.
        num_proc: the number of ranks (default: the number of free threads of all Dask workers).
        start_timeout: the time for all ranks to get a thread, in seconds (default: 600).
        env: variables for the ranks, which override those of the Dask workers (default: none).
        stdout: takes the output of the ranks (default: `sys.stdout`).
        stderr: takes their errors and the messages of the driver (default: `sys.stderr`).
        verbose: 0 for no messages about the start (default: 1).
        nics: the names of the network interfaces by which hosts may reach each other (default: Ronde finds them).
        prefix_output_with_timestamp: begin each line of output with the time (default: false).
        executable: the Python that runs the ranks (default: that of the Dask workers).
        encrypt: encrypt all connections of the job, also those with tensors (default: false).
        require_encrypted_rpc: raise UsageError if Dask would send the job's key unencrypted to another host, instead of
            a warning (default: false).

    Raises:
        WorkerError: a rank failed (`.rank`, `.host`, `.traceback_text`), or a Dask worker was lost. All have ended.
        TimeoutError: too few threads were free within `start_timeout`.
        UsageError: an argument is invalid, or the function cannot be sent.
        Exception: the error of a future among the arguments.
    """
    cluster = DaskCluster(client, require_encrypted_rpc)
    options = RunOptions(
        num_proc=_free_threads(cluster) if num_proc is None else num_proc,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        encrypt=encrypt,
    )
    positional, named = client.gather([args, kwargs or {}])
    try:
        return run_function(cluster, fn, positional, named, options)
    finally:
        cluster.cancel("the function has ended")


def default_cluster() -> DaskCluster:
    """Return the cluster of the newest client, for `ronde.run(..., cluster="dask")` and the like.

    Raises:
        UsageError: there is no client, or it is asynchronous.
    """
    try:
        client = default_client()
    except ValueError:
        raise UsageError("there is no Dask client: create one by distributed.Client(address)") from None
    return DaskCluster(client)


def _free_threads(cluster: DaskCluster) -> int:
    capacity = cluster.capacity()
    if not capacity.free:
        raise UsageError(
            f"the Dask cluster has {capacity.total} threads, none of them free: give num_proc to wait for some"
        )
    return capacity.free
