"""The interface of a backend, and the arguments of its methods.

The rules:
  1. A backend carries collectives of `BackendContext.size` ranks. All ranks make the same calls in the same order, one
     at a time; the thread may be another one every time.
  2. Whether it can carry something (`is_enabled`) depends on the arguments alone, so that all ranks decide alike.
  3. Nothing waits for ever: whoever waits calls `Patience.check` now and then, which raises once the world has failed
     or the time is up. Whatever a call raises fails the world, on every rank.
  4. Memory is used only during the call. After a failure nothing may write to it any more, as far as the library lets
     us.
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
    """Where a backend works.

    `members`: the ranks of the whole job that take part, by rank here. `hosts`: the name of each rank's host;
    `local_rank`: this rank's number among those of its host. `address`: the numeric one that this host offers to
    others. `purpose`: a text that is the same on all ranks and used once. `store`: the job's, where the ranks can meet;
    None if there is but one rank. `timeout_ns`: how long an operation may wait, 0 for ever; `start_timeout_ns`: how
    long `open` may. `has_failed`: whether the world has.
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
    """How long somebody still waits."""

    def __init__(self, place: BackendContext, operation: str) -> None:
        self._place = place
        self._operation = operation
        self._began_ns = time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """How long it has lasted."""
        return time.monotonic_ns() - self._began_ns

    def check(self) -> None:
        """Raise PeerError if the world has failed, TimeoutError if the setting `timeout_ns` says so."""
        place = self._place
        if place.has_failed():
            raise PeerError(f"the world has failed during {self._operation}")
        if 0 < place.timeout_ns <= self.waited_ns:
            message = f"waited {place.timeout_ns // 10**6} ms in {self._operation}"
            raise TimeoutError(message, self._operation, self.waited_ns)


class Backend(ABC):
    """One of them on one rank. Arrays are contiguous and have one axis.

    A third party registers a subclass under the entry point group `ronde.backends`.
    """

    name: ClassVar[str]

    def __init__(self, place: BackendContext) -> None:
        self.place = place

    @abstractmethod
    def missing(self) -> str | None:
        """Return what this rank lacks to take part, as half a sentence; None if it lacks nothing. Waits for nobody."""

    def claim(self) -> str:
        """Return what this rank needs for itself, as a name that no other rank may have too; nothing: empty."""
        return ""

    @abstractmethod
    def open(self) -> None:
        """Connect with the other ranks, all of which lack nothing and call it too."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Let go of everything. `failed`: the others may be gone, or in the middle of an operation."""

    @abstractmethod
    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Whether it carries this operation. Reductions come in the types and forms of `numbers` only."""

    @abstractmethod
    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        """Reduce `x` of all ranks into `out`, which may be `x` itself."""

    @abstractmethod
    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce `x`; `out` is this rank's share of it. `counts`: the elements of every rank's share."""

    @abstractmethod
    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Concatenate the bytes of all ranks. `sizes`: how many each has."""

    @abstractmethod
    def broadcast(self, data: Any, root: int) -> None:
        """Give every rank the bytes of rank `root`, in place."""

    @abstractmethod
    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        """Send consecutive bytes of `x` to each rank, and fill `out` with what each has for this one, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""


class DeviceBackend(Backend):
    """One for memory that only a device can touch. Its arrays are what `view` makes.

    Reductions come in the types of the tensors, except that bool is seen as uint8 (Min and Max), and sums of complex
    numbers as those of their parts. Average comes for floats only, and means that of the library. `device`: whose
    memory it takes, a torch.device.
    """

    device: Any = None

    @abstractmethod
    def view(self, address: int, size: int, dtype: DType) -> Any:
        """Return `size` bytes of the device as an array with one axis."""
