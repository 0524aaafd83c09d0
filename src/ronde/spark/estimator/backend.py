"""Where an estimator's ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pyspark import SparkContext

import ronde.spark
from ronde.errors import UsageError

__all__ = ["EstimatorBackend", "SparkBackend"]


class EstimatorBackend(Protocol):
    """Calls a function on every rank of a job. An object with these methods is a `backend` of a TorchEstimator."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank.

        Args:
            fn: A function that cloudpickle can send. It calls `ronde.init()`.
            args: Positional arguments, the same for all ranks (default: none).
            kwargs: Keyword arguments, the same for all ranks (default: none).
            env: Variables for the ranks (default: none).

        Raises:
            WorkerError: A rank failed.
        """

    def num_processes(self) -> int:
        """Return the number of ranks.

        Raises:
            UsageError: It is not known.
        """


class SparkBackend:
    """Runs an estimator's ranks in Spark tasks, by `ronde.spark.run`.

        backend = SparkBackend(num_proc=4, start_timeout=1800)

    Args:
        num_proc: The number of ranks (default: as of `ronde.spark.run`).
        env: Variables for the ranks (default: none).
        options: Further arguments of `ronde.spark.run`, such as `start_timeout`, `nics`, `stdout` or `encrypt`.

    Raises:
        Nothing: `run` checks the options.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), options

    def __getstate__(self) -> dict[str, Any]:
        options = {name: it for name, it in self._options.items() if name not in ("stdout", "stderr")}
        return {**self.__dict__, "_options": options}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank.

        Args:
            fn: Any function that cloudpickle can send.
            args: Positional arguments, the same for all ranks (default: none).
            kwargs: Keyword arguments, the same for all ranks (default: none).
            env: Variables for the ranks, which override those of the backend (default: none).

        Raises:
            WorkerError: A rank failed (`.rank`, `.host`, `.traceback_text`), or its task was lost. All ranks have
                ended.
            TimeoutError: Spark had too few free slots within `start_timeout`.
            UsageError: An argument is invalid, or there is no Spark session.
        """
        everything = {**self._env, **(env or {})}
        return ronde.spark.run(fn, args, kwargs, self._num_proc, env=everything, **self._options)

    def num_processes(self) -> int:
        """Return the number of ranks.

        Raises:
            UsageError: `num_proc` is missing, and there is no Spark session or it is one of Spark Connect.
        """
        if self._num_proc is not None:
            return self._num_proc
        context = SparkContext._active_spark_context
        if context is None:
            raise UsageError("num_proc is missing: Spark Connect does not report the number of slots")
        return int(context.defaultParallelism)
