"""The backend `gloo`: the Gloo of PyTorch, over sockets, on any machine.

The ranks meet at the job's own store, so whoever does not know the job's key does not take part in the meeting. Gloo's
own connections, which carry the data, know no authentication.

Gloo cannot be interrupted, but its operations end when a rank that they wait for closes its connections. So a rank that
hears of a failure lets go of its group at once, and nobody's operation outlives that for long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from ronde.backends.base import Backend, BackendContext, Patience
from ronde.types import DType, Kind, ReduceOp

__all__ = ["Gloo"]

_LOOK = timedelta(milliseconds=50)  # so long a wait may last until it looks whether the world has failed
_NEVER = timedelta(days=365)
_END_PATIENCE_S = 10.0  # for an operation to end after a failure

_unending: list[Any] = []  # groups whose operation never ended: to destroy them would wait for it


class Gloo(Backend):
    """torch.distributed's ProcessGroupGloo, made for this purpose and known to nobody else."""

    name = "gloo"

    def __init__(self, place: BackendContext) -> None:
        super().__init__(place)
        self._group: Any = None
        self._running: Any = None  # an operation that has begun and not ended

    def missing(self) -> str | None:
        try:
            import torch.distributed as distributed
        except ImportError as error:
            return f"PyTorch cannot be imported ({error})"
        if not distributed.is_available() or not distributed.is_gloo_available():
            return "this PyTorch was built without Gloo"
        if self.place.store is None and self.place.size > 1:
            return "there is no store where the ranks could meet"
        return None

    def open(self) -> None:
        import torch
        from torch.distributed import ProcessGroupGloo as Group
        from torch.distributed import ReduceOp as Op

        self._torch = torch
        operations = (Op.SUM, None, Op.MIN, Op.MAX, Op.PRODUCT, Op.BAND, Op.BOR, Op.BXOR)
        self._operations = dict(zip(ReduceOp, operations))
        options = Group._Options()
        options._devices = [Group.create_device(hostname=self.place.address, lazy_init=False)]
        options._timeout = _NEVER
        from ronde.backends.torch_store import JobStore

        store = JobStore(self.place)
        self._group = Group(store, self.place.rank, self.place.size, options)
        self._await_work("barrier", self._group.barrier())  # everybody has read
        store.forget()

    def close(self, failed: bool) -> None:
        until = time.monotonic() + _END_PATIENCE_S
        while self._running is not None and not self._running.is_completed():
            try:
                self._running.wait(_LOOK)
            except RuntimeError:
                pass
            if time.monotonic() > until:
                _unending.append((self._group, self._running))
                break
        self._group = self._running = None

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        return kind not in (Kind.allreduce, Kind.reducescatter) or dtype < DType.complex64

    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        if x is not out:
            out[:] = x
        if out.size:
            self._await_work("allreduce", self._group.allreduce([self._tensor(out)], self._operations[op]))

    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Gloo has none that takes shares of different sizes: everything is reduced, and the share is kept."""
        whole = x.copy()
        self.allreduce(whole, whole, op)
        begin = sum(counts[: self.place.rank])
        out[:] = whole[begin : begin + out.size]

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Gloo wants the same size of all ranks: shorter arrays are filled up."""
        longest = max(sizes)
        is_even = min(sizes) == longest
        mine = x
        if x.size < longest:
            mine = np.zeros(longest, np.uint8)
            mine[: x.size] = x
        everything = out if is_even else np.empty(longest * len(sizes), np.uint8)
        rows = list(self._tensor(everything).chunk(len(sizes)))
        self._await_work("allgather", self._group.allgather([rows], [self._tensor(mine)]))
        if not is_even:
            end = 0
            for rank, size in enumerate(sizes):
                out[end : end + size] = everything[rank * longest : rank * longest + size]
                end += size

    def broadcast(self, data: Any, root: int) -> None:
        self._await_work("broadcast", self._group.broadcast(self._tensor(data), root))

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        sent, received = self._tensor(x), self._tensor(out)
        work = self._group.alltoall_base(received, sent, list(out_sizes), list(in_sizes))
        self._await_work("alltoall", work)

    def barrier(self) -> None:
        self._await_work("barrier", self._group.barrier())

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array)

    def _await_work(self, operation: str, work: Any) -> None:
        """Wait for an operation. Raises what went wrong with it, and what Patience raises."""
        self._running = work
        patience: Patience | None = None
        while True:
            try:
                work.wait(_LOOK)
                break
            except RuntimeError:
                if work.is_completed():
                    self._running = None
                    work.wait()  # at once. If it ended just after the time was over, all is well; else this raises why.
                    break
            patience = patience or self.place.patience(f"{operation} by gloo")
            patience.check()
        self._running = None
