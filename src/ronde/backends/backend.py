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

import atexit
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ronde.errors import PeerError, TimeoutError
from ronde.stores.store import Store
from ronde.types import DType, Kind, ReduceOp

__all__ = [
    "Backend",
    "BackendContext",
    "DeviceBackend",
    "Patience",
    "at_exit",
]


_SPIN_NS, _REST_S = 2 * 10**9, 50e-6
_at_exit: list[Callable[[], None]] = []


@dataclass(frozen=True)
class BackendContext:
    """The ranks that a backend serves, and their limits.

    Attributes:
        rank: This rank, from 0.
        size: The number of ranks.
        members: For each rank here, its rank in the job.
        hosts: For each rank, the name of its host.
        local_rank: This rank's number among those of its host, from 0.
        address: The numeric address that this host offers to others.
        purpose: A text that is the same on all ranks and used once, for names in the store.
        store: The job's store, where the ranks can meet; None if there is one rank.
        timeout_ns: How long an operation may wait, in nanoseconds; 0: for ever.
        start_timeout_ns: How long `open` may wait, in nanoseconds.
        has_failed: Returns whether the world has failed.
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

    def lack_of_store(self) -> str | None:
        """Return why the ranks have no store where they can meet, as a clause for `Backend.missing`; None if they have.

        Raises nothing.
        """
        return (
            "the job has no store where the ranks can meet" if self.store is None and self.size > 1 else None
        )

    def patience(self, operation: str) -> Patience:
        """Return the patience for an operation that begins now. Raises nothing.

        Args:
            operation: The name of the operation, for errors, such as "allreduce".
        """
        return Patience(self, operation)


class Patience:
    """Limits the wait for one operation, which begins with this object.

        self.place.patience("allreduce").wait_until(request.is_done)

    Args:
        place: The ranks and their limits.
        operation: The name of the operation, for errors.
    """

    def __init__(self, place: BackendContext, operation: str) -> None:
        self._place = place
        self._operation = operation
        self._began_ns = time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """The time since the operation began, in nanoseconds."""
        return time.monotonic_ns() - self._began_ns

    def check(self) -> None:
        """Return if the operation may wait on. Call it every few milliseconds while it waits.

        Raises:
            PeerError: The world has failed.
            TimeoutError: The operation has waited for `BackendContext.timeout_ns`.
        """
        place = self._place
        if place.has_failed():
            raise PeerError(f"the world has failed during {self._operation}")
        if 0 < place.timeout_ns <= self.waited_ns:
            message = f"waited {place.timeout_ns // 10**6} ms in {self._operation}"
            raise TimeoutError(message, self._operation, self.waited_ns)

    def wait_until(self, is_done: Callable[[], bool], spin_ns: int = _SPIN_NS) -> None:
        """Return when the operation is done. Most take a short time, so the wait begins without pauses.

        Args:
            is_done: Returns whether the operation is done, at once.
            spin_ns: The time without pauses, in nanoseconds since the operation began (two seconds). Later the calls
                of `is_done` are 50 microseconds apart.

        Raises:
            PeerError, TimeoutError: As of `check`.
        """
        while not is_done():
            self.check()
            if self.waited_ns < spin_ns:
                os.sched_yield()
            else:
                time.sleep(_REST_S)


class Backend(ABC):
    """A backend on one rank. Arrays are contiguous and have one axis.

    A third party registers a subclass under the entry point group `ronde.backends`.

    All ranks call `missing` and `claim`; if none of them lacks anything, all call `open`, then the same collectives in
    the same order, from any thread, one at a time, and at last `close`. An array is one of NumPy with one axis, or for
    a `DeviceBackend` what `view` returns. An exception in a collective fails the world, on every rank.

    Args:
        place: The ranks that the backend serves, and their limits.

    Attributes:
        name: The name of the backend in the setting `backends`.
        place: As given.
    """

    name: ClassVar[str]

    def __init__(self, place: BackendContext) -> None:
        self.place = place

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this rank cannot take part, as a clause such as "PyTorch cannot be imported"; None if it can.

        The call does not wait for other ranks. Raises nothing.
        """

    def claim(self) -> str:
        """Return the name of a resource that this rank cannot share with other ranks, such as a GPU, or "".

        Ranks that claim the same name cannot use the backend. Called if `missing` has returned None. Raises nothing.
        """
        return ""

    @abstractmethod
    def open(self) -> None:
        """Connect with the other ranks. All ranks call it, after `missing` has returned None on each.

        Raises:
            TimeoutError: The others did not connect within `BackendContext.start_timeout_ns`.
            Exception: Any other reason. It fails the world, on every rank.
        """

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Release all resources. Collectives that still run must not write to their memory any more, if possible.

        Raises nothing.

        Args:
            failed: The other ranks may be gone, or in the middle of an operation: do not wait for them.
        """

    @abstractmethod
    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        """Return whether the backend carries an operation. The answer depends on the arguments alone. Raises nothing.

        Args:
            kind: The operation.
            dtype: The type of the elements. Reductions come only in the forms of `ronde.backends.carrier`, such as Sum
                of float32, or in those of `DeviceBackend`.
            op: The reduction; without effect for other operations.
        """

    @abstractmethod
    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        """Reduce the arrays of all ranks, element by element; each rank gets the result.

        Args:
            x: This rank's array, of any length; the same length and dtype on all ranks.
            out: Receives the result, of the same length and dtype; it may be `x` itself.
            op: A reduction for which `is_enabled` is true.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """

    @abstractmethod
    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce the arrays of all ranks, and give each rank a share of the result, in the order of ranks.

        Args:
            x: This rank's array of `sum(counts)` elements.
            out: Receives this rank's share, `counts[rank]` elements. In the host's memory it does not overlap `x`.
            counts: The number of elements of every rank's share; 0 is possible.
            op: A reduction for which `is_enabled` is true.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """

    @abstractmethod
    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Concatenate the bytes of all ranks, in the order of ranks.

        Args:
            x: This rank's array of `sizes[rank]` bytes.
            out: Receives `sum(sizes)` bytes. In the host's memory it does not overlap `x`.
            sizes: The number of bytes of every rank; some may be 0, but not all.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """

    @abstractmethod
    def broadcast(self, data: Any, root: int) -> None:
        """Copy the bytes of a rank to every rank, in place.

        Args:
            data: An array of bytes, of the same length on all ranks and not empty.
            root: The rank whose bytes the others get.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """

    @abstractmethod
    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        """Send consecutive bytes to each rank, and receive the bytes from each rank, in the order of ranks.

        Args:
            x: The bytes for all ranks, `sum(in_sizes)` of them.
            in_sizes: The number of bytes for every rank; 0 is possible.
            out: Receives the bytes of all ranks, `sum(out_sizes)` of them.
            out_sizes: The number of bytes from every rank; 0 is possible.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            PeerError, TimeoutError: As of `Patience.check`.
            Exception: Any error of the library. It fails the world, on every rank.
        """


class DeviceBackend(Backend):
    """A backend for memory that only a device can access. Its arrays are those that `view` returns.

    Reductions come in the types of the tensors, except that bool arrives as uint8 (Min and Max), and a complex sum as
    the sum of real parts and imaginary parts. Average comes for floats only, and is the library's.

    Args:
        place: As of `Backend`.

    Attributes:
        device: The torch.device of the memory.
    """

    device: Any = None

    @abstractmethod
    def view(self, address: int, size: int, dtype: DType) -> Any:
        """Return memory of the device as an array with one axis, without a copy. Raises nothing.

        Args:
            address: The address of the first byte.
            size: The number of bytes.
            dtype: The type of the elements.
        """


def at_exit(action: Callable[[], None]) -> None:
    """Run an action at the end of the process, after the engine has shut down.

    Python runs handlers of `atexit` in the opposite order of their registration. The engine imports this module before
    it registers its own handler, so the actions follow it. Raises nothing.

    Args:
        action: what to run, such as finalizing the library.
    """
    _at_exit.append(action)


def _run_actions() -> None:
    for action in _at_exit:
        action()


atexit.register(_run_actions)
