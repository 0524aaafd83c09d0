"""The backend `gloo`: the Gloo of PyTorch, over sockets, on any machine.

The ranks meet at the job's store, so only processes that know the job key take part in the meeting. Gloo's connections,
which carry the data, have no authentication.

Gloo cannot be interrupted, but its operations end when a rank that they wait for closes its connections. So a rank that
learns of a failure closes its group at once, and operations of other ranks end soon after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from ronde.backends.backend import Backend, BackendContext, Patience
from ronde.types import DType, Kind, ReduceOp

__all__ = ["Gloo"]

_LOOK = timedelta(milliseconds=50)  # how often a wait checks whether the world has failed
_NEVER = timedelta(days=365)
_END_PATIENCE_S = 10.0  # how long an operation may take to end after a failure

_unending: list[Any] = []  # groups whose operation did not end: destroying them would wait for it


class Gloo(Backend):
    """A ProcessGroupGloo of torch.distributed, which only this object knows."""

    name = "gloo"

    def __init__(self, place: BackendContext) -> None:
        super().__init__(place)
        self._group: Any = None
        self._running: Any = None  # an operation that has not ended

    def missing(self) -> str | None:
        try:
            import torch.distributed as distributed
        except ImportError as error:
            return f"PyTorch cannot be imported ({error})"
        if not distributed.is_available() or not distributed.is_gloo_available():
            return "this PyTorch was built without Gloo"
        return self.place.lack_of_store()

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
        self._await_work("barrier", self._group.barrier())  # all ranks have read the store
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
        """Reduce the whole array, and keep the share: Gloo does not support shares of different sizes."""
        whole = x.copy()
        self.allreduce(whole, whole, op)
        begin = sum(counts[: self.place.rank])
        out[:] = whole[begin : begin + out.size]

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Gather arrays that are padded to the longest: Gloo expects the same size from all ranks."""
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
        """Wait for an operation. Raises its error, and the errors of Patience."""
        self._running = work
        patience: Patience | None = None
        while True:
            try:
                work.wait(_LOOK)
                break
            except RuntimeError:
                if work.is_completed():
                    self._running = None
                    # Returns at once if the operation has ended just now, otherwise raises its error.
                    work.wait()
                    break
            patience = patience or self.place.patience(f"{operation} by gloo")
            patience.check()
        self._running = None
