"""Parses the setting `backends`, and finds backends by name.

The setting is a list for all operations, `mpi,native`, lists for some, `allreduce=mpi,native;broadcast=gloo`, or both,
`native;allreduce=gloo,native`. Operations without a list are native. The first backend of a list that supports a tensor
carries it.
"""

from __future__ import annotations

import importlib

from ronde.backends.base import Backend
from ronde.errors import UsageError
from ronde.types import Kind

__all__ = ["NATIVE", "OPERATIONS", "backend_class", "wishes"]

NATIVE = "native"

OPERATIONS = (
    Kind.allreduce,
    Kind.reducescatter,
    Kind.allgather,
    Kind.broadcast,
    Kind.alltoall,
    Kind.barrier,
)

_GROUP = "ronde.backends"  # of entry points
_OURS = {
    "mpi": ("ronde.backends.mpi", "MPI"),
    "gloo": ("ronde.backends.gloo", "Gloo"),
    "ccl": ("ronde.backends.ccl", "CCL"),
    "nccl": ("ronde.backends.nccl", "NCCL"),
}


def wishes(text: str) -> dict[Kind, list[str]]:
    """Return the names for each operation, in order of preference. Raises UsageError for an invalid list."""
    names = {kind.name: kind for kind in OPERATIONS}
    wanted: dict[Kind, list[str]] = {}
    default = [NATIVE]
    for part in filter(None, (part.strip() for part in text.split(";"))):
        operation, equals, listed = part.rpartition("=")
        order = list(dict.fromkeys(name for name in (word.strip() for word in listed.split(",")) if name))
        if not order:
            raise UsageError(f"backends={text!r} is invalid: expected the name of a backend in {part!r}")
        if not equals:
            default = order
        elif operation.strip() in names:
            wanted[names[operation.strip()]] = order
        else:
            raise UsageError(
                f"backends={text!r} is invalid: {operation.strip()!r} is not one of the operations {', '.join(names)}"
            )
    return {kind: wanted.get(kind, default) for kind in OPERATIONS}


def backend_class(name: str) -> type[Backend]:
    """Return the backend of this name, Ronde's or a registered one. Raises UsageError for an unknown name."""
    if name in _OURS:
        module, attribute = _OURS[name]
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    from importlib.metadata import entry_points  # here, because it is slow and seldom needed

    registered = {point.name: point for point in entry_points(group=_GROUP)}
    if name in registered:
        loaded: type[Backend] = registered[name].load()
        return loaded
    known = ", ".join([NATIVE, *_OURS, *sorted(registered)])
    raise UsageError(f"backend {name!r} does not exist: expected one of {known}")
