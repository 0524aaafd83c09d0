"""Ronde: distributed training and iterative computation on many processes.

    import numpy, ronde

    ronde.init()
    world = ronde.world()
    total = world.allreduce(numpy.ones(3) * world.rank)

Start it with `ronde run -n 4 script.py`, or `ronde.run(function, np=4)` in a program or notebook. The names of this
package, by subject; `help(ronde.init)` shows one of them:

    the process    init, shutdown, is_initialized, rank, size, local_rank, local_size, cross_rank, cross_size,
                   is_homogeneous
    arrays         allreduce, allgather, broadcast, alltoall, reducescatter: of all ranks, by name, in any order;
                   allreduce_async, allgather_async, broadcast_async, alltoall_async, reducescatter_async: return a
                   Handle for synchronize, poll; grouped_allreduce, grouped_allgather, grouped_reducescatter,
                   grouped_allreduce_async, grouped_allgather_async, grouped_reducescatter_async: several at once;
                   join, barrier
    objects        broadcast_object, allgather_object
    reductions     Sum, Average, Min, Max, Product, Adasum, BitAnd, BitOr, BitXor (a ReduceOp each)
    communicator   world() returns the Communicator of all ranks: blocking operations in program order, and send, recv,
                   split, empty (symmetric memory)
    some ranks     ProcessSet, add_process_set, remove_process_set, global_process_set, get_process_set_ids_and_ranks
    programs       run, record, Checkpoints
    what happens   stragglers, start_timeline, stop_timeline
    errors         RondeError; UsageError, NotInitializedError, UnsupportedError; CollectiveError; MismatchError;
                   PeerError, PeerLostError, AbortedError, TimeoutError, RemoteError, WorkerError; StaleRoundError;
                   ProtocolError, AuthenticationError, VersionError

Packages for programs:

    ronde.elastic    run: training that goes on, in the same processes, when other ranks are lost
    ronde.torch      PyTorch, with the names of horovod.torch: DistributedOptimizer, ...
    ronde.comqueue   iterate: a step function in several tasks, again and again
    ronde.ml         estimators with scikit-learn's interface
    ronde.spark, ronde.ray, ronde.dask, ronde.flink    functions and estimators on a cluster
    ronde.parquet    training from Parquet files
    ronde.testing    real ranks, hosts and faults, for tests
"""

# This module holds names only; what needs NumPy or the native part is imported when it is first used.

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ronde.errors import (
    AbortedError,
    AuthenticationError,
    CollectiveError,
    MismatchError,
    NotInitializedError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RondeError,
    StaleRoundError,
    TimeoutError,
    UnsupportedError,
    UsageError,
    VersionError,
    WorkerError,
)
from ronde.types import Adasum, Average, BitAnd, BitOr, BitXor, Max, Min, Product, ReduceOp, Sum

if TYPE_CHECKING:
    __version__: str

    from ronde._native import Handle
    from ronde.checkpoints import Checkpoints
    from ronde.comm.communicator import Communicator
    from ronde.comm.world import (
        cross_rank,
        cross_size,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        rank,
        size,
        world,
    )
    from ronde.engine.objects import allgather_object, broadcast_object
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
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_async,
        grouped_reducescatter,
        grouped_reducescatter_async,
        poll,
        reducescatter,
        reducescatter_async,
        stragglers,
        synchronize,
    )
    from ronde.engine.process import (
        ProcessSet,
        add_process_set,
        get_process_set_ids_and_ranks,
        global_process_set,
        init,
        join,
        remove_process_set,
        shutdown,
        start_timeline,
        stop_timeline,
    )
    from ronde.launch.callables import run
    from ronde.process.uncaught import record

__all__ = [
    "AbortedError",
    "Adasum",
    "AuthenticationError",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Checkpoints",
    "CollectiveError",
    "Communicator",
    "Handle",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "ProtocolError",
    "ReduceOp",
    "RemoteError",
    "RondeError",
    "StaleRoundError",
    "Sum",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "WorkerError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "record",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "stragglers",
    "synchronize",
    "world",
]

_PLACES = {  # all other names are operations of the engine
    "ronde._native": "Handle",
    "ronde.checkpoints": "Checkpoints",
    "ronde.comm.communicator": "Communicator",
    "ronde.comm.world": "cross_rank cross_size is_homogeneous is_initialized local_rank local_size rank size world",
    "ronde.engine.objects": "allgather_object broadcast_object",
    "ronde.engine.process": (
        "ProcessSet add_process_set get_process_set_ids_and_ranks global_process_set init join remove_process_set "
        "shutdown start_timeline stop_timeline"
    ),
    "ronde.launch.callables": "run",
    "ronde.process.uncaught": "record",
}
_LAZY = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("ronde")
    elif name == "elastic":  # the one package that programs use by its full name
        value = _import_room("ronde.elastic")
    elif name in __all__:
        value = getattr(_import_room(_LAZY.get(name, "ronde.engine.operations")), name)
    else:
        raise AttributeError(_unknown(name), name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def _import_room(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        from ronde.hidden_modules import describe_hiding

        if hint := describe_hiding(f"{error}", next(iter(sys.path), "")):
            error.add_note(hint)
        raise


def _unknown(name: str) -> str:
    from ronde.foreign_names import advice

    return f"module 'ronde' has no attribute {name!r}" + advice("ronde", name, [*__all__, "torch"])


def __dir__() -> list[str]:
    return sorted(__all__)
