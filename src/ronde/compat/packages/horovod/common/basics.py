"""`horovod.common.basics`: the functions about this process and the job as methods of an object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ronde.comm import world
from ronde.engine import process
from ronde.engine.process import ProcessSet
from ronde.types import Adasum, Average, Max, Min, Product, Sum

from . import util

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's functions that need no framework. The arguments, which name Horovod's library, have no effect."""

    Adasum, Average, Max, Min, Product, Sum = Adasum, Average, Max, Min, Product, Sum

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def init(
        self,
        comm: Sequence[int] | None = None,
        process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
        **how: Any,
    ) -> None:
        """Join the world, as `horovod.torch.init` does; `comm`: None or the list of all ranks."""
        from ronde.torch.basics import init

        init(comm, process_sets, **how)

    shutdown = staticmethod(process.shutdown)
    start_timeline = staticmethod(process.start_timeline)
    stop_timeline = staticmethod(process.stop_timeline)
    is_initialized = staticmethod(world.is_initialized)
    rank = staticmethod(world.rank)
    size = staticmethod(world.size)
    local_rank = staticmethod(world.local_rank)
    local_size = staticmethod(world.local_size)
    cross_rank = staticmethod(world.cross_rank)
    cross_size = staticmethod(world.cross_size)
    is_homogeneous = staticmethod(world.is_homogeneous)
    mpi_built = staticmethod(util.mpi_built)
    gloo_built = staticmethod(util.gloo_built)
    nccl_built = staticmethod(util.nccl_built)
    ddl_built = staticmethod(util.ddl_built)
    ccl_built = staticmethod(util.ccl_built)

    def __getattr__(self, name: str) -> Any:
        if name in ("cuda_built", "gloo_enabled", "mpi_enabled", "mpi_threads_supported", "rocm_built"):
            from ronde.torch import basics

            return getattr(basics, name)
        raise AttributeError(f"HorovodBasics of Ronde has no {name}")
