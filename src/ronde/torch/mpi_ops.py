"""`hvd.mpi_ops`: the module in which Horovod has its operations, reductions and questions about the world.

Scripts import from it, or ask for `hvd.mpi_ops.Sum`. MPI has no part in it.
"""

from __future__ import annotations

from ronde.comm.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from ronde.engine.process import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    shutdown,
    start_timeline,
    stop_timeline,
)
from ronde.errors import CollectiveError as HorovodInternalError
from ronde.torch import basics, operations
from ronde.torch.basics import *  # noqa: F403
from ronde.torch.handles import poll, synchronize
from ronde.torch.operations import *  # noqa: F403
from ronde.torch.tensors import sparse_allreduce_async
from ronde.types import Adasum, Average, Max, Min, Product, Sum

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
__all__ += basics.__all__
__all__ += operations.__all__
