"""`horovod.spark`: `run` and `run_elastic` by `ronde.spark`, and which GPUs a worker has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ronde.spark
from ronde.compat.calls import with_horovod, with_horovods_words
from ronde.environment import environment
from ronde.errors import UsageError

from .. import add_modules  # noqa: TID252 - type checkers do not know a package horovod

__all__ = ["run", "run_elastic"]

R = TypeVar("R")
PREFIX = "[{rank}]<{stream}>:"  # Horovod's, for programs that read the output


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[R]:
    """Call `fn` in workers on the executors as `ronde.spark.run` does, with Horovod's order of parameters.

    `extra_mpi_args` has no effect without `use_mpi`. In the workers Ronde answers for Horovod.
    """
    with with_horovods_words("Spark tasks"):
        return ronde.spark.run(
            with_horovod(fn),
            args,
            kwargs,
            num_proc,
            _seconds(start_timeout, "HOROVOD_SPARK_START_TIMEOUT"),
            env,
            stdout,
            stderr,
            verbose,
            nics,
            use_mpi,
            use_gloo,
            prefix_output_with_timestamp,
            executable,
            prefix=PREFIX,
            extra_mpi_args=extra_mpi_args if use_mpi else None,
        )


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
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[R]:
    """Call `fn` in workers as executors come and go, as `ronde.spark.run_elastic` does. In them Ronde is Horovod."""
    with with_horovods_words("Spark tasks"):
        return ronde.spark.run_elastic(
            with_horovod(fn),
            args,
            kwargs,
            num_proc,
            min_np if min_num_proc is None else min_num_proc,
            max_np if max_num_proc is None else max_num_proc,
            _seconds(start_timeout, "HOROVOD_SPARK_START_TIMEOUT"),
            _seconds(elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT"),
            reset_limit,
            env,
            stdout,
            stderr,
            verbose,
            nics,
            prefix_output_with_timestamp,
            prefix=PREFIX,
        )


def _seconds(given: float | None, variable: str) -> float | None:
    """Return the time that is given, or else that of Horovod's variable for it."""
    text = environment().get(variable)
    if given is not None or not text:
        return given
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is invalid: expected a number of seconds above 0") from None


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has given this worker's task; empty outside a worker, or if Spark gives none.

    The worker sees those of all tasks on its host, in the order of their local ranks.
    """
    variables = environment()
    gpus = [name.strip() for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    rank, size = int(variables.get("LOCAL_RANK", "0")), int(variables.get("LOCAL_WORLD_SIZE", "1"))
    first = rank * len(gpus) // size
    return gpus[first : first + max(1, len(gpus) // size)]  # several tasks may share a GPU


add_modules(__name__, task=["get_available_devices"])
