"""The interface of a backend, and the arguments of its methods.

The rules:
  1. A backend carries collectives of `BackendContext.size` ranks. All ranks make the same calls in the same order, one
     at a time, from any thread.
  2. `is_enabled` depends on its arguments alone, so that all ranks decide alike.
  3. No call waits for ever: a waiting call runs `Patience.check` regularly, which raises when the world has failed or
     the time is up. An exception in a call fails the world, on every rank.
  4. A backend uses memory only during the call. After a failure it must not write to that memory, as far as the library
     allows.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ronde.errors import PeerError, TimeoutError
from ronde.net.stores.base import Store
from ronde.types import DType, Kind, ReduceOp

__all__ = ["Backend", "DeviceBackend", "Patience", "BackendContext"]


@dataclass(frozen=True)
class BackendContext:
    """The ranks that a backend serves, and their limits.

    `members`: by rank here, its rank in the job. `hosts`: the name of each rank's host; `local_rank`: this rank's
    number among those of its host. `address`: the numeric address that this host offers to others. `purpose`: a text
    that is the same on all ranks and used once. `store`: the job's store, where the ranks can meet; None if there is
    one rank. `timeout_ns`: how long an operation may wait (0: for ever); `start_timeout_ns`: how long `open` may wait.
    `has_failed`: returns whether the world has failed.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    hosts: tuple[str, ...]
    local_rank: int
    address: str
    purpose: str
    store: Store | None
    timeout_ns: int
    start_timeout_ns: int
    has_failed: Callable[[], bool]

    def patience(self, operation: str) -> Patience:
        """Return the patience for an operation that begins now."""
        return Patience(self, operation)


class Patience:
    """Limits the wait for one operation."""

    def __init__(self, place: BackendContext, operation: str) -> None:
        self._place = place
        self._operation = operation
        self._began_ns = time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """The time since the operation began."""
        return time.monotonic_ns() - self._began_ns

    def check(self) -> None:
        """Raise PeerError if the world has failed, TimeoutError after `timeout_ns`."""
        place = self._place
        if place.has_failed():
            raise PeerError(f"the world has failed during {self._operation}")
        if 0 < place.timeout_ns <= self.waited_ns:
            message = f"waited {place.timeout_ns // 10**6} ms in {self._operation}"
            raise TimeoutError(message, self._operation, self.waited_ns)


class Backend(ABC):
    """A backend on one rank. Arrays are contiguous and have one axis.

    A third party registers a subclass under the entry point group `ronde.backends`.
    """

    name: ClassVar[str]

    def __init__(self, place: BackendContext) -> None:
        self.place = place

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this rank cannot take part, as a clause; None if it can. The call does not wait for other
        ranks.
        """

    def claim(self) -> str:
        """Return the name of a resource that this rank cannot share with other ranks, or ""."""
        return ""

    @abstractmethod
    def open(self) -> None:
        """Connect with the other ranks. All ranks call it, after `missing` has returned None on each."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Release all resources. `failed`: the other ranks may be gone, or in the middle of an operation."""

    @abstractmethod
    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Return whether the backend carries this operation. Reductions come only in the forms of `numbers`."""

    @abstractmethod
    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        """Reduce `x` of all ranks into `out`, which may be `x` itself."""

    @abstractmethod
    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `x` of all ranks; `out` receives this rank's share. `counts`: the elements of every rank's share."""

    @abstractmethod
    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Concatenate the bytes of all ranks. `sizes`: of each rank, in bytes."""

    @abstractmethod
    def broadcast(self, data: Any, root: int) -> None:
        """Copy the bytes of rank `root` to every rank, in place."""

    @abstractmethod
    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        """Send consecutive bytes of `x` to each rank, and fill `out` with the bytes from each rank, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""


class DeviceBackend(Backend):
    """A backend for memory that only a device can access. Its arrays are those that `view` returns.

    Reductions come in the types of the tensors, except that bool arrives as uint8 (Min and Max), and a complex sum as
    the sum of real parts and imaginary parts. Average comes for floats only, and is the library's. `device`: the
    torch.device of the memory.
    """

    device: Any = None

    @abstractmethod
    def view(self, address: int, size: int, dtype: DType) -> Any:
        """Return `size` bytes of the device as an array with one axis."""
