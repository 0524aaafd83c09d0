"""What stands between the native engine and a backend: bytes become numbers in a form that the backend knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ronde.backends.base import Backend
from ronde.backends.numbers import form_of, typed
from ronde.types import Allreduce, DType, Kind, ReduceOp, Reducescatter

__all__ = ["Carrier"]


class Carrier:
    """Called by cpp/bind_backend.cc, with memory as arrays of bytes and enums as their numbers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Whether the backend carries this, in whatever form."""
        if kind is Allreduce or kind is Reducescatter:
            form = form_of(dtype, op, self._backend.place.size)
            return self._backend.is_enabled(kind, form.dtype, form.op)
        return self._backend.is_enabled(kind, dtype, op)

    def allreduce(self, x: Any, out: Any, dtype: int, op: int) -> None:
        given, form = DType(dtype), form_of(DType(dtype), ReduceOp(op), self._backend.place.size)
        if form.pack is None:
            place = out.view(form.dtype.name)
            self._backend.allreduce(place if x is out else x.view(form.dtype.name), place, form.op)
            carried = place
        else:
            carried = form.pack(typed(x, given))
            self._backend.allreduce(carried, carried, form.op)
        if form.unpack is not None:
            form.unpack(carried, typed(out, given))

    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], dtype: int, op: int) -> None:
        given, form = DType(dtype), form_of(DType(dtype), ReduceOp(op), self._backend.place.size)
        if form.pack is None:
            carried, share = _apart(x, out).view(form.dtype.name), out.view(form.dtype.name)
        else:
            carried = form.pack(typed(x, given))
            share = np.empty(counts[self._backend.place.rank], carried.dtype)
        self._backend.reducescatter(carried, share, [count * form.parts for count in counts], form.op)
        if form.unpack is not None:
            form.unpack(share, typed(out, given))

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        if sum(sizes):
            self._backend.allgather(_apart(x, out), out, sizes)

    def broadcast(self, data: Any, root: int) -> None:
        if data.size:
            self._backend.broadcast(data, root)

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        self._backend.alltoall(x, in_sizes, out, out_sizes)

    def barrier(self) -> None:
        self._backend.barrier()


def _apart(x: Any, out: Any) -> Any:
    """Return the input, or a copy if the result overlaps it: libraries do not expect that."""
    return x.copy() if np.may_share_memory(x, out) else x
