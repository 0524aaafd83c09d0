"""`horovod.ray.runner`: `RayExecutor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ronde.ray
from ronde.compat.calls import with_horovod
from ronde.errors import UnsupportedError

__all__ = ["RayExecutor"]

R = TypeVar("R")


class RayExecutor(ronde.ray.RayExecutor):
    """The executor of `ronde.ray`. Its functions and executables may import `horovod.torch`, which is Ronde."""

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, as `ronde.ray.RayExecutor.start` does."""
        maker = with_horovod(executable_cls) if executable_cls else None
        super().start(maker, executable_args, executable_kwargs, extra_env_vars)

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[R]:
        """Call `fn` in all workers; return the results by rank. Raises UnsupportedError for `callbacks`."""
        if callbacks:
            raise UnsupportedError(
                "callbacks are not supported: Ronde has no ray_logger; print in the function, and the output "
                "appears here"
            )
        return super().run(with_horovod(fn), args, kwargs)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn` in all workers; return Ray references to the results, by rank."""
        return super().run_remote(with_horovod(fn), args, kwargs)

    def execute(self, fn: Callable[[Any], R]) -> list[R]:
        """Call `fn(executable)` in all workers; return the results by rank."""
        return super().execute(with_horovod(fn))

    def execute_single(self, fn: Callable[[Any], R]) -> R:
        """Call `fn(executable)` in the worker of rank 0; return its result."""
        return super().execute_single(with_horovod(fn))
