"""`horovod.ray`: the executor of `ronde.ray`, in whose workers Ronde answers for Horovod.

`ElasticRayExecutor` is Horovod's older class for what `RayExecutor(min_workers=...)` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ronde.ray
from ronde.compat.calls import with_horovod
from ronde.errors import UnsupportedError

from . import add_modules

__all__ = ["ElasticRayExecutor", "RayExecutor"]

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


@dataclass(frozen=True)
class ElasticSettings:
    """What `ElasticRayExecutor.create_settings` returns."""

    min_num_proc: int
    max_num_proc: int | None
    reset_limit: int | None
    elastic_timeout: int
    workers: ronde.ray.RaySettings


class RayHostDiscovery:
    """Asks Ray for its nodes. Ronde's executors do so themselves; this is for programs that want to know.

    Args:
        use_gpu: Whether a slot needs GPUs (default: false).
        cpus_per_slot: The CPUs of a slot (default: 1).
        gpus_per_slot: The GPUs of a slot with `use_gpu` (default: 1).
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return how many slots each node has, by the node's address, of nodes that have any."""
        import ray

        slot = ronde.ray.Placing(self.cpus_per_slot, self.gpus_per_slot if self.use_gpu else 0)
        slots = {
            str(node["NodeManagerAddress"]): slot.slots_in(node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        }
        return {node: number for node, number in slots.items() if number}


class ElasticRayExecutor:
    """Runs functions in workers on a Ray cluster while nodes come and go, as `RayExecutor(min_workers=...)` does.

    Args:
        settings: What `create_settings` returns.
        use_gpu: Whether Ray reserves GPUs for each worker (default: false).
        cpus_per_slot: The CPUs that Ray reserves for each worker (default: 1).
        gpus_per_slot: The GPUs that Ray reserves for each worker with `use_gpu` (default: 1).
        env_vars: Variables for the environment of the workers (default: none).
        override_discovery: Has no effect, because Ray knows its nodes.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: int = 600,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **others: Any,
    ) -> ElasticSettings:
        """Return settings. `ssh_identity_file` and `others` have no effect, besides `verbose`."""
        workers = RayExecutor.create_settings(timeout_s, nics=nics, verbose=int(others.get("verbose", 1)))
        return ElasticSettings(
            min_num_proc if min_np is None else min_np,
            max_num_proc if max_np is None else max_np,
            reset_limit,
            elastic_timeout,
            workers,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        self.settings = settings
        self._environment = env_vars
        self._executor = RayExecutor(
            settings.workers,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout,
        )

    def start(self) -> None:
        """Check that this process is connected to a Ray cluster. The workers start with `run`."""
        self._executor.start(extra_env_vars=self._environment)

    def run(
        self, worker_fn: Callable[[], R], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[R]:
        """Call `worker_fn()` in all workers; return the results of the last ones, by rank."""
        return self._executor.run(worker_fn, callbacks=callbacks)


add_modules(
    __name__,
    elastic=["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"],
    elastic_v2=["RayHostDiscovery"],
    runner=["RayExecutor"],
)
