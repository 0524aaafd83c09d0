"""Ronde for PyTorch, with the names of `horovod.torch`.

    import ronde.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

docs/from-horovod.md says what differs.
"""

from __future__ import annotations

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

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
__all__ += mpi_ops.__all__
