"""Ronde: distributed training and iterative computation on many processes.

    import numpy, ronde

    ronde.init()
    world = ronde.world()
    total = world.allreduce(numpy.ones(3) * world.rank)

Start it with `ronde run -n 4 script.py`. This module holds names only; what needs NumPy or the native part is imported
when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ronde.errors import (
    AbortedError,
    AuthenticationError,
    MismatchError,
    NotInitializedError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RondeError,
    TimeoutError,
    UsageError,
    VersionError,
)
from ronde.types import Average, BitAnd, BitOr, BitXor, Max, Min, Product, ReduceOp, Sum

if TYPE_CHECKING:
    from ronde._native import Handle
    from ronde.comm.communicator import Communicator
    from ronde.comm.queries import (
        cross_rank,
        cross_size,
        is_homogeneous,
        local_rank,
        local_size,
        rank,
        size,
    )
    from ronde.comm.world import is_initialized, world
    from ronde.engine.operations import (
        allgather,
        allgather_async,
        allreduce,
        allreduce_async,
        alltoall,
        alltoall_async,
        barrier,
        broadcast,
        broadcast_async,
        poll,
        reducescatter,
        reducescatter_async,
        synchronize,
    )
    from ronde.engine.process import init, shutdown, start_timeline, stop_timeline

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Communicator",
    "Handle",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "PeerLostError",
    "Product",
    "ProtocolError",
    "ReduceOp",
    "RemoteError",
    "RondeError",
    "Sum",
    "TimeoutError",
    "UsageError",
    "VersionError",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "world",
]

_OPERATIONS = (
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
)

_LAZY = {
    "Communicator": "ronde.comm.communicator",
    **dict.fromkeys(("is_initialized", "world"), "ronde.comm.world"),
    "Handle": "ronde._native",
    **dict.fromkeys(("init", "shutdown", "start_timeline", "stop_timeline"), "ronde.engine.process"),
    **dict.fromkeys(_OPERATIONS, "ronde.engine.operations"),
    **dict.fromkeys(
        ("cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"),
        "ronde.comm.queries",
    ),
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'ronde' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
