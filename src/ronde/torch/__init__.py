"""Ronde for PyTorch, with the names of `horovod.torch`.

    import ronde.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

docs/from-horovod.md says what differs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ronde.torch import mpi_ops
from ronde.torch.compression import Compression, Compressor
from ronde.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.torch.mpi_ops import *  # noqa: F403
from ronde.torch.optimizer import DistributedOptimizer
from ronde.torch.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from ronde.torch import elastic

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += mpi_ops.__all__


def __getattr__(name: str) -> Any:
    if name == "elastic":  # imported when it is first used, because it changes torch.distributed
        return importlib.import_module("ronde.torch.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
