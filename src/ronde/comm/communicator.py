"""The communicator: collectives in program order, blocking, without negotiation.

The rules:
  1. All ranks of a communicator make the same calls in the same order, one thread at a time.
  2. Every call returns, or raises: `UsageError` if the arguments are invalid (nothing was sent, or the error says that
     the other ranks have their results), `MismatchError` if the ranks made different calls, a `PeerError` if the
     communicator has failed. After a `PeerError` every later call raises the same one.
  3. Arrays are NumPy arrays, PyTorch CPU tensors, or anything with DLPack or the buffer protocol; results are of the
     input's kind. `out` receives the result, of the right shape and type; it may be the input itself.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from ronde import _native
from ronde.comm import arrays
from ronde.comm.arrays import ArrayT, Number, Operand, late_target, operand, target
from ronde.comm.shared_memory import share_segment
from ronde.comm.splits import check_has_rows, even_split, row_counts
from ronde.comm.topology import ListNote, contradiction_of, note_of
from ronde.errors import MismatchError, RondeError, UsageError
from ronde.foreign_names import advice
from ronde.stall.reports import CALLS
from ronde.stall.watch import StallWatch
from ronde.types import DType, Kind, ReduceOp, Sum

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from ronde.comm.byte_exchange import Exchange
    from ronde.comm.topology import Topology
    from ronde.settings import Settings

__all__ = ["Communicator", "alive"]

_log = logging.getLogger("ronde.comm")

_SENT_ALREADY_NS = 60 * 10**9  # ample: the descriptor has been sent already


class Communicator:
    """A fixed set of ranks that make the same calls in the same order. Get one from `ronde.world()` or `split()`."""

    def __init__(
        self,
        native: _native.Communicator,
        topology: Topology,
        connect: Callable[..., Communicator],
        label: str,
        names: Sequence[int],
    ) -> None:
        """`label`: its unique name in messages, the same on all ranks. `names`: by rank, its rank in the world."""
        self._native = native
        self.label, self.names = label, names
        self._stalls: StallWatch | None = None
        self._topology = topology
        self._connect = connect
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._splits_made = 0  # the number of splits, the same on all ranks
        self._deadline_ns: int | None = None  # of the communicators that it makes; None: by the settings
        self._allreduce = native.allreduce
        alive.add(self)

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}>"

    if not TYPE_CHECKING:  # type checkers report names that do not exist

        def __getattr__(self, name: str) -> None:
            public = [each for each in dir(type(self)) if not each.startswith("_")]
            message = f"'Communicator' object has no attribute {name!r}{advice('communicator', name, public)}"
            raise AttributeError(message, name=name, obj=self)

    # Rank, size, and hosts

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""
        return self._topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._topology.size

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        return self._topology.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""
        return self._topology.local_size

    @property
    def cross_rank(self) -> int:
        """The number of this host among those that have a rank with this local rank."""
        return self._topology.cross_rank

    @property
    def cross_size(self) -> int:
        """The number of hosts that have a rank with this local rank."""
        return self._topology.cross_size

    @property
    def is_homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return self._topology.is_homogeneous

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host."""
        return self._topology.hosts

    # For other parts of Ronde

    @property
    def topology(self) -> Topology:
        """The hosts of all ranks, and the place of this rank among them."""
        return self._topology

    @property
    def native(self) -> _native.Communicator:
        """The native communicator, for native code that calls it."""
        return self._native

    def has_failed(self) -> bool:
        """Return whether the communicator has failed: every later call raises the same error."""
        return self._native.has_failed()

    def distrust(self, rank: int, what: str) -> NoReturn:
        """Treat `rank` as lost on all ranks, because it has sent `what`. Raises PeerLostError."""
        self._native.distrust(rank, what)

    def check_adasum(self, dtype: DType) -> None:
        """Raise UsageError if these ranks cannot combine values of this type by Adasum."""
        self._native.check_adasum(dtype)

    # Collectives

    @overload
    def allreduce(self, x: Number, *, op: ReduceOp = Sum) -> NDArray[Any]: ...
    @overload
    def allreduce(self, x: ArrayT, *, op: ReduceOp = Sum, out: ArrayT | None = None) -> ArrayT: ...
    def allreduce(self, x: ArrayT | Number, *, op: ReduceOp = Sum, out: ArrayT | None = None) -> Any:
        """Combine the arrays of all ranks element by element, and return the result on all ranks.

            total = ronde.world().allreduce(x)

        Min and Max propagate NaN; averages of integers are truncated towards zero; 16-bit floats are summed in float32
        and rounded once. Arrays of `empty` are not copied. docs/communicator.md has the order of sums.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array or a PyTorch tensor on the CPU; the result is of the same kind. A number, or anything else
                with DLPack or the buffer protocol, gives a NumPy array. Any dtype of float16, bfloat16, float32,
                float64, int8 to int64, uint8 to uint64, bool, complex64, complex128; the same shape and dtype on all
                ranks.
            op: the reduction: ronde.Sum, Average, Min, Max, Product, BitAnd, BitOr, BitXor, or Adasum (default: Sum;
                `ronde.allreduce` and `ronde.torch.allreduce` average by default).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        if op.__class__ is not ReduceOp:
            raise _no_reduction(op)
        result = arrays.like(x) if out is None else out
        if self._allreduce(x, result, op, out is None):
            return result
        given = operand(x)
        goal = target(given, given.shape, out)
        self._native.allreduce_as(given.memory, goal.memory, given.dtype, op, given.shape)
        return goal.finish()

    def reduce(
        self, x: ArrayT, root: int = 0, *, op: ReduceOp = Sum, out: ArrayT | None = None
    ) -> ArrayT | None:
        """Combine the arrays of all ranks like `allreduce`. Return the result at `root`, None elsewhere.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
            root: the rank that gets the result (default: 0).
            op: the reduction, as for `allreduce`, but not Adasum (default: Sum).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        if op.__class__ is not ReduceOp:
            raise _no_reduction(op)
        done = self._native.reduce(x, out, op, root)
        if done is out or done is None:
            return done
        given = operand(x)
        if self.rank != self._root(root):
            self._native.reduce_as(given.memory, None, given.dtype, op, root, given.shape)
            return None
        goal = target(given, given.shape, out)
        self._native.reduce_as(given.memory, goal.memory, given.dtype, op, root, given.shape)
        return goal.finish()

    def reducescatter(self, x: ArrayT, *, op: ReduceOp = Sum, out: ArrayT | None = None) -> ArrayT:
        """Combine like `allreduce`, but return only this rank's share of the first axis.

        The first axis is split as `numpy.array_split` does: the first `len(x) % size` ranks get one row more.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
            op: the reduction, as for `allreduce`, but not Adasum (default: Sum).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        if op.__class__ is not ReduceOp:
            raise _no_reduction(op)
        if out is not None and self._native.reduce_scatter(x, out, op):
            return out
        given = self._with_axis(x, "reducescatter")
        rows = even_split(given.row_count, self.size)
        goal = target(given, (rows[self.rank], *given.row_shape), out)
        counts = [row * given.row_items for row in rows]
        self._native.reduce_scatter_as(given.memory, goal.memory, counts, given.dtype, op, given.shape)
        return goal.finish()

    @overload
    def allgather(self, x: Number) -> NDArray[Any]: ...
    @overload
    def allgather(self, x: ArrayT, *, out: ArrayT | None = None) -> ArrayT: ...
    def allgather(self, x: ArrayT | Number, *, out: ArrayT | None = None) -> Any:
        """Concatenate the arrays of all ranks along the first axis, in rank order, and return the result on all ranks.

        First dimensions may differ between ranks, the others must agree. 0-d arrays give one element each.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
                axis, the same shape on all ranks.
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent, unless the error says that the other ranks have their
                results (`out` has the wrong shape). The next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        answer = self._native.allgather(x, out)
        if answer is out:
            return answer
        given = operand(x)
        rows = answer or self._begin_gather(given, -1)
        with self._awaited("allgather"):
            goal = late_target(given, (sum(rows), *given.row_shape), out)
        row_bytes = given.row_bytes
        sizes = [row * row_bytes for row in rows]
        self._native.end_gather_as(given.memory, goal.memory, sizes, given.dtype, -1)
        return goal.finish()

    def gather(self, x: ArrayT, root: int = 0, *, out: ArrayT | None = None) -> ArrayT | None:
        """Concatenate like `allgather`. Return the result at `root`, None elsewhere.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
                axis, the same shape on all ranks.
            root: the rank that gets the result (default: 0).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent, unless the error says that the other ranks have their
                results (`out` has the wrong shape). The next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        answer = self._native.gather(x, out, root)
        if answer is out or answer is None:
            return answer
        given = operand(x)
        rows = answer or self._begin_gather(given, self._root(root))
        row_bytes = given.row_bytes
        sizes = [row * row_bytes for row in rows]
        if self.rank != root:
            self._native.end_gather_as(given.memory, None, sizes, given.dtype, root)
            return None
        with self._awaited("gather"):
            goal = late_target(given, (sum(rows), *given.row_shape), out)
        self._native.end_gather_as(given.memory, goal.memory, sizes, given.dtype, root)
        return goal.finish()

    @overload
    def broadcast(self, x: Number, root: int = 0) -> NDArray[Any]: ...
    @overload
    def broadcast(self, x: ArrayT, root: int = 0, *, out: ArrayT | None = None) -> ArrayT: ...
    def broadcast(self, x: ArrayT | Number, root: int = 0, *, out: ArrayT | None = None) -> Any:
        """Return `root`'s array on all ranks. `x` has the same shape and dtype on all ranks; `out=x` works in place.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same shape and dtype on all ranks.
            root: the rank that gives the array (default: 0).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        if out is not None and self._native.broadcast(x, out, root):
            return out
        given = operand(x)
        goal = target(given, given.shape, out)
        if self.rank == self._root(root) and goal.result is not x:
            arrays.copy(given, goal)
        self._native.broadcast_as(goal.memory, given.dtype, root, given.shape)
        return goal.finish()

    def scatter(self, x: Any = None, root: int = 0, *, out: Any = None) -> Any:
        """Split `root`'s array along the first axis, as `numpy.array_split` does, and return this rank's part.

        Only `root` passes `x`. The other ranks get NumPy arrays, or `out`.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`; not used on other ranks than `root`.
            root: the rank that gives the array (default: 0).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent, unless the error says that the other ranks have their
                results (`out` has the wrong shape). The next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        words = self._native.scatter(x, out, root)
        if words is out:
            return words
        given = self._with_axis(x, "scatter") if self.rank == self._root(root) else None
        words = words or self._begin_scatter(given, root)
        whole = self._described(words) if given is None else given
        rows = even_split(whole.row_count, self.size)
        with self._awaited("scatter"):
            goal = late_target(whole, (rows[self.rank], *whole.row_shape), out)
        memory = None if given is None else given.memory
        sizes = [row * whole.row_bytes for row in rows]
        self._native.end_scatter_as(memory, goal.memory, sizes, whole.dtype, root)
        return goal.finish()

    def alltoall(
        self, x: ArrayT, splits: Sequence[int] | None = None, *, out: ArrayT | None = None
    ) -> ArrayT:
        """Send part p of the rows of `x` to rank p, and return the parts for this rank, concatenated in rank order.

        All ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`, of the same dtype and, except for the first
                axis, the same shape on all ranks.
            splits: the number of rows for each rank, which add up to `len(x)` (None: the same number for all).
            out: an array of the result's shape and dtype that receives the result (None: a new array).

        Raises:
            UsageError: an argument is invalid. Nothing was sent, unless the error says that the other ranks have their
                results (`out` has the wrong shape). The next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        receiving = None if splits is not None else self._native.alltoall(x, out)
        if receiving is out and out is not None:
            return out  # type: ignore[no-any-return]
        given = self._with_axis(x, "alltoall")
        sending = row_counts(splits, given.row_count, self.size)
        if out is not None and arrays.overlap(given.memory, operand(out).memory):
            raise UsageError("alltoall cannot work in place: out must be other memory than x")
        if not receiving:
            receiving = self._native.begin_alltoall_as(
                given.memory, sending, given.row_items, given.dtype, given.row_shape
            )
        with self._awaited("alltoall"):
            goal = late_target(given, (sum(receiving), *given.row_shape), out)
        row_bytes = given.row_bytes
        in_sizes = [rows * row_bytes for rows in sending]
        out_sizes = [rows * row_bytes for rows in receiving]
        self._native.end_alltoall_as(
            given.memory, in_sizes, goal.memory, out_sizes, given.dtype, given.row_shape
        )
        return goal.finish()

    def barrier(self) -> None:
        """Return when all ranks have called it.

        All ranks call it, in the same order as their other calls.

        Raises:
            UsageError: this communicator has been shut down.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        self._native.barrier()

    # Point to point

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send the array to rank `dest`, which calls `recv`; return when `x` may be changed again.

        Messages between two ranks are received in the order in which they were sent; `tag` (>= 0) must agree.

        Only the two ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array, a CPU tensor or a number, as for `allreduce`.
            dest: the receiving rank, not this one.
            tag: a number from 0 to 2**31 - 1, the same in `recv` (default: 0).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        given = operand(x)
        self._native.send_as(given.memory, given.dtype, dest, _tag(tag))

    def recv(self, x: ArrayT, source: int, tag: int = 0) -> ArrayT:
        """Fill `x` with the next array from rank `source`, of the same size and dtype, and return `x`.

        Only the two ranks call it, in the same order as their other calls.

        Args:
            x: a NumPy array or a CPU tensor, as for `allreduce`, that can be changed.
            source: the sending rank, not this one.
            tag: a number from 0 to 2**31 - 1, the same in `send` (default: 0).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        given = operand(x)
        goal = target(given, given.shape, x)
        self._native.recv_as(goal.memory, given.dtype, source, _tag(tag))
        return goal.finish()

    # Ronde's messages, as NumPy arrays of bytes: between hosts they carry tags, with any setting `protection`

    def _send_sealed(self, message: np.ndarray, dest: int, tag: int = 0) -> None:
        self._native.send_as(message, DType.uint8, dest, tag, sealed=True)

    def _recv_sealed(self, message: np.ndarray, source: int, tag: int = 0) -> None:
        self._native.recv_as(message, DType.uint8, source, tag, sealed=True)

    def _broadcast_sealed(self, message: np.ndarray, root: int) -> None:
        self._native.broadcast_as(message, DType.uint8, root, message.shape, sealed=True)

    # Making more

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a new communicator of the ranks with the same `color`, ordered by `key`, then by rank.

        All ranks call it, in the same order as their other calls.

        Args:
            color: a whole number >= 0, or None for a rank that takes part in no new communicator.
            key: the order of the ranks in the new communicator (default: 0, the order of this one).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        if color is not None and (not isinstance(color, (int, np.integer)) or color < 0):
            raise UsageError(f"a color must be None or a whole number >= 0, not {color!r}")
        everyone = self._exchange_words([-1 if color is None else color, key])
        self._splits_made += 1
        if color is None:
            return None
        ranks = [rank for rank in range(self.size) if everyone[rank][0] == color]
        ranks.sort(key=lambda rank: (everyone[rank][1], rank))
        return self._child(ranks)

    def group(self, ranks: Iterable[int], *, disjoint: bool = False) -> Communicator | None:
        """Return a communicator of these ranks, in this order; None on the others.

        All ranks pass the same list. With `disjoint=True` one call makes several groups: each rank lists the members of
        the one that it belongs to, or none.

            pair = world.group([0, 3] if world.rank in (0, 3) else [1, 2], disjoint=True)

        All ranks call it, in the same order as their other calls.

        Args:
            ranks: different ranks of this communicator: the same list on all ranks or, with `disjoint`, on all members.
            disjoint: whether each rank lists the group that it belongs to (default: False).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        members = [operator.index(rank) for rank in ranks]
        if len(set(members)) != len(members) or not all(0 <= rank < self.size for rank in members):
            raise UsageError(f"ranks must be distinct numbers from 0 to {self.size - 1}, not {members}")
        if disjoint and members and self.rank not in members:
            raise UsageError(
                f"with disjoint=True each rank lists its own group, but rank {self.rank} lists {members}; a rank "
                "without a group passes []"
            )
        notes = [ListNote(*words) for words in self._exchange_words(note_of(members, disjoint))]
        contradiction = contradiction_of(notes, lambda rank: self._list_of(rank, notes[rank].length, members))
        if contradiction is not None:
            raise MismatchError(contradiction)
        self._splits_made += 1
        return self._child(members) if self.rank in members else None

    def duplicate(self) -> Communicator:
        """Return another communicator of the same ranks, with a separate order of calls.

        Symmetric memory of either is symmetric for both; only one thread at a time may call `empty` on the two.

        All ranks call it, in the same order as their other calls.

        Raises:
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        self._splits_made += 1
        return self._child(list(range(self.size)), is_twin=True)

    @contextmanager
    def connecting_by(self, deadline_ns: int) -> Iterator[None]:
        """Connect the communicators that the block makes of this one by this time of the monotonic clock."""
        self._deadline_ns = deadline_ns
        try:
            yield
        finally:
            self._deadline_ns = None

    def _group_by(
        self, exchange: Exchange, ranks: Sequence[int], name: str, deadline_ns: int
    ) -> Communicator:
        """Return a communicator of these ranks, which they alone make; it has no order with other calls.

        `exchange`: among them, in this order. `name`: the same on all of them, used once for these ranks. A group of
        all ranks, in this order, shares the symmetric memory of this communicator. `deadline_ns`: of the
        monotonic clock.
        """
        is_twin = list(ranks) == list(range(self.size))
        return self._child(list(ranks), is_twin, name, exchange, deadline_ns)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> np.ndarray[Any, Any]:
        """Return a NumPy array of zeros in symmetric memory, which all ranks of the host share.

        Collectives work directly on such arrays and their views if all ranks of a host pass some. `torch.from_numpy`
        makes a tensor of it. The memory lives as long as the array or a view of it.

        All ranks call it, in the same order as their other calls.

        Args:
            shape: a length, or lengths of all axes, the same on all ranks.
            dtype: any NumPy dtype (default: float32).

        Raises:
            UsageError: an argument is invalid. Nothing was sent; the next call works.
            MismatchError: the ranks made different calls; the error quotes both.
            PeerLostError: a rank died, left or cannot be reached. It is final for this communicator.
            AbortedError: a rank called `abort`.
            TimeoutError: other ranks are missing for longer than the setting `timeout_ns` (default: no limit).
        """
        kind = np.dtype(dtype)
        axes = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(shape)
        if any(axis < 0 for axis in axes):
            raise UsageError(f"an array cannot have the shape {axes}")
        nbytes = math.prod(axes) * kind.itemsize
        asked = self._native.exchange(Kind.empty, DType.uint8, -1, 0, nbytes, ())
        for rank, other in enumerate(asked):
            if other != asked[0]:
                raise MismatchError(
                    f"rank 0 called empty() for {asked[0]} bytes, but rank {rank} called it for {other} bytes"
                )
        part_bytes = -(-max(nbytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
        try:
            part = self._native.map_symmetric(self._share_segment(part_bytes * self.local_size), part_bytes)
        except BaseException as error:
            # Otherwise the ranks would disagree about their memory, or wait for this one.
            self.abort(f"failed in empty(): {error!r}")
            raise
        return part[:nbytes].view(kind).reshape(axes)

    def abort(self, reason: str) -> None:
        """Fail this communicator on all ranks: pending and later calls raise AbortedError.

        Any thread of any rank may call it, also while another thread is inside a collective. Raises no error.

        Args:
            reason: the text of the error.
        """
        self._native.abort(reason)

    def watch_stalls(self, settings: Settings) -> None:
        """Start to report calls that wait too long."""
        self._stalls = StallWatch(
            lambda hub: _native.watch_calls(self._native, hub, self.label),
            CALLS._replace(where=self.label),
            *(_log, settings, self.rank, self.hosts, self.names),
        )

    def leave_stalls(self) -> None:
        """Stop reporting calls: an engine takes the communicator, and watches its tensors instead."""
        if self._stalls is not None:
            self._stalls.close()

    def shutdown(self) -> None:
        """Leave; other ranks finish calls that do not need this rank. Raises no error; later calls raise UsageError."""
        for child in list(self._children):
            child.shutdown()
        self.leave_stalls()
        self._native.shutdown()

    # Private

    def _exchange_words(self, words: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, which pass equally many, by rank. All ranks call it."""
        mine = np.array([words] * self.size, np.int64)
        everyone = np.empty_like(mine)  # all-to-all, because that carries tags
        sizes = [mine.itemsize * mine.shape[1]] * self.size
        self._native.alltoall_as(mine, sizes, everyone, sizes, DType.int64, mine.shape, sealed=True)
        return everyone.tolist()  # type: ignore[no-any-return]

    def _list_of(self, rank: int, length: int, mine: Sequence[int]) -> list[int]:
        """Return the list of this length that rank `rank` passes as `mine`. All ranks call it."""
        listed = np.array(mine if rank == self.rank else [0] * length, np.int64)
        if length:
            self._broadcast_sealed(listed.view(np.uint8), rank)
        return listed.tolist()  # type: ignore[no-any-return]

    def _child(
        self,
        ranks: list[int],
        is_twin: bool = False,
        name: str | None = None,
        exchange: Exchange | None = None,
        deadline_ns: int | None = None,
    ) -> Communicator:
        name = str(self._splits_made) if name is None else name
        by_ns = deadline_ns or self._deadline_ns
        child = self._connect(self, ranks, name, is_twin, exchange, by_ns)
        self._children.add(child)
        return child

    def _share_segment(self, nbytes: int) -> int:
        """Return a descriptor of new memory that the ranks of this host share.

        The other ranks take it after it has been sent: they wait in a barrier, which fails if a rank is lost.
        """
        leads = self.local_rank == 0
        if not leads:
            self._native.barrier()
        deadline_ns = time.monotonic_ns() + _SENT_ALREADY_NS
        segment = share_segment(self._native, self._topology, nbytes, deadline_ns)
        if leads:
            self._native.barrier()
        return segment

    @contextmanager
    def _awaited(self, operation: str) -> Iterator[None]:
        """Abort the communicator if the block fails: in the middle of an operation, the other ranks wait for this
        one.
        """
        try:
            yield
        except RondeError:
            raise
        except BaseException as error:
            self.abort(f"failed in {operation}: {error!r}")
            raise

    def _abandon(self) -> None:
        """In a forked child: release the parent's connections and memory."""
        if self._stalls is not None:
            self._stalls.abandon()
        self._native.abandon()

    def _root(self, root: int) -> int:
        if not hasattr(root, "__index__") or not 0 <= root < self.size:
            raise UsageError(f"root {root} is not one of the ranks 0 to {self.size - 1}")
        return root

    def _with_axis(self, x: Any, operation: str) -> Operand:
        given = operand(x)
        check_has_rows(given.shape, operation)
        return given

    def _begin_gather(self, given: Operand, root: int) -> list[int]:
        """Return the number of rows of each rank; dtype and shape of a row must agree."""
        return self._native.begin_gather_as(
            given.memory, given.row_count, given.row_items, given.dtype, root, given.row_shape
        )

    def _begin_scatter(self, given: Operand | None, root: int) -> list[int]:
        """Return dtype and shape of the root's operand."""
        if given is None:
            return self._native.begin_scatter_as(None, [], [], root)
        sizes = [rows * given.row_bytes for rows in even_split(given.row_count, self.size)]
        return self._native.begin_scatter_as(given.memory, [given.dtype, *given.shape], sizes, root)

    def _described(self, words: list[int]) -> Operand:
        """Return an operand without memory, of this dtype and shape."""
        with self._awaited("scatter"):
            dtype = DType(words[0])
            return Operand(None, dtype, tuple(words[1:]), np.empty(0, _numpy_dtype(dtype)))


_PAGE_BYTES = 4096

alive: weakref.WeakSet[Communicator] = weakref.WeakSet()  # of this process


def _abandon_all() -> None:
    for communicator in list(alive):
        communicator._abandon()


# A forked child, such as a data loader's worker, would keep its parent's connections open, and so hide its death.
os.register_at_fork(after_in_child=_abandon_all)


def _no_reduction(op: object) -> UsageError:
    names = ", ".join(f"ronde.{each.name}" for each in ReduceOp)
    return UsageError(f"op must be one of {names}, not {op!r}")


def _tag(tag: int) -> int:
    if not 0 <= tag < 2**31:
        raise UsageError(f"a tag must be a number from 0 to {2**31 - 1}, not {tag}")
    return tag


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.bfloat16:
        import ml_dtypes  # an optional package, which programs with bfloat16 in NumPy have installed

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(dtype.name)
