"""The contestants of the benchmarks: one class for each, of which every rank has one instance.

Making one joins the other ranks. `rank` and `size` are attributes. Each operation that the contestant has is a method

    operation(count) -> call

that allocates and touches the buffers and returns a function without arguments that makes one call on them. Elements
are float32; `count` is the length of the operation's largest buffer on any rank, a multiple of the number of ranks:
of the vector for allreduce, broadcast and reduce, of the result for allgather and gather, of the input for
reducescatter, alltoall and scatter, of the message for sendrecv, where neighbours play ping-pong and one call is a
round trip. `barrier` is an operation, too, and ignores the count.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["CONTESTANTS", "OPERATIONS", "Call", "join"]

OPERATIONS = (
    "allreduce",
    "allgather",
    "broadcast",
    "reducescatter",
    "alltoall",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "sendrecv",
)

CONTESTANTS = {  # name -> module and class
    "memcpy": ("memcpy", "Memcpy"),
    "ronde-symmetric": ("ronde_world", "Symmetric"),
    "ronde-private": ("ronde_world", "Private"),
    "gloo": ("torch_gloo", "Gloo"),
    "openmpi": ("open_mpi", "OpenMPI"),
}

Call = Callable[[], Any]


def join(name: str) -> Any:
    """Return a new instance of the contestant. Raises ImportError if its packages are not installed."""
    module, kind = CONTESTANTS[name]
    return getattr(importlib.import_module(f"contestants.{module}"), kind)()
