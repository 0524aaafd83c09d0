"""Ronde on Flink: `run` calls a function in workers on a Flink cluster. Needs `pip install 'ronde[flink]'`.

See docs/flink.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from ronde.errors import UsageError
from ronde.foreign_names import other_names
from ronde.launch.clusters.platforms import needs_package
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions

with needs_package("pyflink", "flink"):
    from ronde.flink.cluster import FlinkCluster

__all__ = ["FlinkCluster", "run"]

R = TypeVar("R")
LAST_WAIT_S = 20  # for the job's slots to be free again


@other_names(np="num_proc", environment="env")
def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    settings: Mapping[str, str] | None = None,
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
    """Call `fn(*args, **kwargs)` in new processes on a Flink cluster, the ranks of a job; return the results by rank.

        results = ronde.flink.run(train, (10,), num_proc=4)

    Each rank occupies a slot of a TaskManager while it runs. Any thread may call this, several at once.

    Args:
        fn: any function that cloudpickle can send; the TaskManagers need PyFlink, Ronde and the modules it imports.
        args: positional arguments, the same for all ranks (default: none).
        kwargs: keyword arguments, the same for all ranks (default: none).
        num_proc: the number of ranks (default: the number of free slots of the cluster).
        settings: settings of Flink, such as "execution.target", "rest.address" and "python.executable", which override
            those of its configuration file (default: none). Without a target, Flink runs in this process.
        start_timeout: the time for all ranks to get a slot, in seconds (default: 600). Flink itself gives up after
            `slot.request.timeout` (5 min).
        env: variables for the ranks, which override those of the TaskManagers (default: none).
        stdout: takes the output of the ranks (default: `sys.stdout`).
        stderr: takes their errors and the messages of the driver (default: `sys.stderr`).
        verbose: 0 for no messages about the start (default: 1).
        nics: the names of the network interfaces by which hosts may reach each other (default: Ronde finds them).
        prefix_output_with_timestamp: begin each line of output with the time (default: false).
        executable: the Python that runs the ranks (default: that of Flink's tasks).
        encrypt: encrypt all connections of the job, also those with tensors (default: false).
        require_encrypted_rpc: raise UsageError if Flink would send the job's key unencrypted to another host, instead
            of a warning (default: false).

    Raises:
        WorkerError: a rank failed (`.rank`, `.host`, `.traceback_text`), or the Flink job failed or was cancelled. All
            have ended.
        TimeoutError: too few slots were free within `start_timeout`.
        UsageError: an argument is invalid, the function cannot be sent, or no cluster answers.
    """
    cluster = FlinkCluster(settings, require_encrypted_rpc)
    options = RunOptions(
        num_proc=_free_slots(cluster) if num_proc is None else num_proc,
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
    try:
        return run_function(cluster, fn, args, kwargs or {}, options)
    finally:
        cluster.cancel("the function has ended")
        cluster.wait(LAST_WAIT_S)


def _free_slots(cluster: FlinkCluster) -> int:
    capacity = cluster.capacity()
    if capacity is None:
        raise UsageError(
            "num_proc is missing: a Flink cluster in this process has as many slots as a job needs"
        )
    if not capacity.free:
        raise UsageError(
            f"the Flink cluster has {capacity.total} slots, none of them free: give num_proc to wait for some"
        )
    return capacity.free
