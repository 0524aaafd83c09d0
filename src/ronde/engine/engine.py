"""The engine of the world, or of a process set: checks and prepares tensors of users for its negotiator.

`negotiator` agrees with the other ranks, `chosen_backends` carry the bytes through other libraries, and cpp/engine runs
without the interpreter.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ronde import _native
from ronde._native import Handle
from ronde.comm.affinity import starting_threads_on
from ronde.comm.arrays import Operand, ResultT, operand
from ronde.comm.byte_exchange import allgather_bytes, require_equal
from ronde.comm.communicator import Communicator
from ronde.comm.splits import row_counts
from ronde.engine.chosen_backends import DEVICE_MEMORY, ChosenBackends
from ronde.engine.messages import TensorType
from ronde.engine.negotiator import Negotiator
from ronde.engine.submission import (
    FiniteCheck,
    RequestTerms,
    Submit,
    address,
    check_name,
    check_request,
    normal_terms,
    prepare_submission,
    repeat_of,
    signature_of,
)
from ronde.engine.timeline import Timeline
from ronde.engine.tuner import begin_tuning
from ronde.engine.tuning import LARGEST_FUSION_BYTES
from ronde.errors import TimeoutError
from ronde.settings import Settings
from ronde.stall.reports import TENSORS, Subject
from ronde.stall.watch import StallWatch, hide_thread
from ronde.types import Adasum, Allreduce, Alltoall, Barrier, DType, Kind, ReduceOp

__all__ = ["Arrivals", "Engine"]

_log = logging.getLogger("ronde.engine")

# The settings that must be the same on all ranks.
_EQUAL_SETTINGS = (
    *("cache_capacity", "fusion_bytes", "batch_bytes", "largest_fused_bytes", "disable_group_fusion"),
    *("join_average", "autotune", "tree_arity", "backends"),
)
_KNOWN = 2**16  # names; more would let a program that never repeats a name fill the memory
_UNNAMED_IN_FLIGHT = 64  # operations without a name, of each sort
_SURVEY_NS = 5 * 10**9  # ample: answers take milliseconds


class Arrivals(NamedTuple):
    """How a rank's tensors arrived, of those that needed no negotiation.

    `tensors`: how many were executed; `last`: of how many it was the last rank of its host; `late_s`: how many seconds
    later than the rank that is earliest on average it submitted a tensor, on average.
    """

    rank: int
    host: str
    tensors: int
    last: int
    late_s: float


class Engine:
    """An engine of this rank. Every rank of its communicator makes one, at the same place in its program."""

    def __init__(
        self,
        comm: Communicator,
        settings: Settings,
        core: int | None,
        timeline: Timeline,
        label: str = "",
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Start the engine.

        `comm`: used by no one else; the engine shuts it down. `core`: for its threads (None: any). `timeline`: of the
        process, where `label` precedes the names of tensors. `ranks`: its ranks in the world (None: all).
        """
        capacity = settings.cache_capacity
        self._rank, self._size, self._hosts = comm.rank, comm.size, comm.hosts
        self._names = range(comm.size) if ranks is None else ranks
        self._comm = comm
        require_equal(
            partial(allgather_bytes, comm), {name: getattr(settings, name) for name in _EQUAL_SETTINGS}
        )
        is_tuned = settings.autotune and ranks is None
        board = self._comm.empty(_native.board_bytes(capacity), np.uint8)
        buffer = self._comm.empty(_fusion_buffer_bytes(settings, is_tuned), np.uint8)
        self._cycle = _native.Cycle(
            self._comm.native,
            board,
            capacity,
            buffer,
            settings.linger_ns,
            settings.disable_group_fusion,
            settings.tree_arity,
        )
        self._backends = ChosenBackends(self._cycle, self._comm, settings, ranks)
        self.timeline = timeline
        self._cycle.record_into(timeline.native, label, self._names)
        with starting_threads_on(core):
            tuner = begin_tuning(self._cycle, comm, settings, is_tuned)
        self._comm.barrier()  # from here on all ranks listen, so no note is lost
        self._known: dict[str, tuple[RequestTerms, _native.Signature]] = {}  # as last submitted
        # Of names that have been submitted twice: arguments of `submit`, and the call that submits the next tensor.
        self._repeats: dict[str | None, tuple[tuple[object, ...], _native.Repeat]] = {}
        self._unnamed: dict[str, _UnnamedNames] = {}
        self.divides_by_all = settings.join_average == "all"
        self._negotiator = Negotiator(
            *(self._comm, self._cycle, self._names, settings.tree_arity, capacity),
            divides_by_all=self.divides_by_all,
            tuner=tuner,
        )
        self._submit: Submit = self._negotiator.submit
        self._misses = self._negotiator.misses
        self._is_checked = settings.check_finite != "off"
        if self._is_checked:
            finite = FiniteCheck(comm, self._names[comm.rank], settings.check_finite == "raise")
            self._submit = finite.before(self._negotiator.submit)
        self._negotiator.on_resume = self._unnamed.clear
        self._negotiator.on_failure = lambda: self._backends.close(failed=self._comm.has_failed())
        with starting_threads_on(core):
            self._negotiator.thread.start()
        hide_thread(self._negotiator.thread)
        comm.leave_stalls()
        self._stalls = StallWatch(
            lambda hub: self._cycle.watch_stalls(hub, comm.label),
            *(self._subject(), _log, settings, comm.rank, comm.hosts, self._names),
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def _subject(self) -> Subject:
        """Return the words of stall reports, which name the libraries that may be slow."""
        if not (others := " or ".join(self.backends())):
            return TENSORS
        complete = f"it is being executed, perhaps by {others}, and does not end"
        return TENSORS._replace(complete=complete)

    def arrivals(self) -> list[Arrivals]:
        """Return how the tensors of each rank have arrived so far. Raises TimeoutError if a rank does not answer."""
        answers = self._stalls.native.survey(_SURVEY_NS)
        missing = tuple(rank for rank, answer in zip(self._names, answers) if answer is None)
        if missing:
            raise TimeoutError(f"ranks {missing} do not answer", "stragglers", _SURVEY_NS, missing)
        known = [answer for answer in answers if answer is not None]
        waited_s = [waited_ns / max(tensors, 1) / 1e9 for tensors, _, waited_ns in known]
        return [
            Arrivals(name, host, tensors, last, max(waited_s) - own_s)
            for name, host, (tensors, last, _), own_s in zip(self._names, self._hosts, known, waited_s)
        ]

    def backends(self) -> list[str]:
        """Return the names of the backends in use besides the native one."""
        return self._backends.names()

    def carries(self, kind: Kind, dtype: DType, op: ReduceOp, device: Any) -> bool:
        """Return whether a backend takes tensors in the memory of this device (a torch.device) without a copy."""
        return self._backends.carries(kind, dtype, op, device)

    def submit(
        self,
        kind: Kind,
        x: ResultT,
        name: str | None,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        waits: bool = False,
        root: int = -1,
        splits: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> Handle[ResultT]:
        """Submit a tensor; return its handle.

        `x`: any array (None for a barrier); it must not change until the handle is done. `name`: the same on all ranks;
        None numbers the tensors of a kind in the order of submission. `op`, `prescale`, `postscale`: of reductions;
        `root`: of a broadcast; `splits`: of an all-to-all. `out`: receives the result, may be `x`. `waits`: the caller
        calls `wait()` next, and the submission itself does the first part of the wait. `device`: the type of the device
        of which `x` is a copy, or that type and " memory" if `x` itself is there and a backend `carries` it. Raises
        ValueError for a name that is in flight, UsageError for invalid arguments, PeerError if the world has failed. If
        ranks submit different operations, `wait()` raises MismatchError on all of them.
        """
        arguments = (kind, op, root, prescale, postscale, device)
        repeated = self._repeats.get(name)
        if repeated is not None and repeated[0] == arguments and name not in self._misses:
            handle: Handle[ResultT] | None = repeated[1].submit(x, out, waits)
            if handle is not None:
                return handle
        given: tuple[Operand, ...] = ()
        dtype = DType.uint8
        shape: tuple[int, ...] = ()
        if kind is not Barrier:
            array = operand(x, device != "cpu" and device.endswith(DEVICE_MEMORY))
            given, dtype, shape = (array,), array.dtype, array.shape
        rows = () if kind is not Alltoall else row_counts(splits, shape[0] if shape else 0, self._size)
        if name is not None:
            known = self._known.get(name)
            if known is not None:
                if known[0] == (kind, dtype, shape, op, root, prescale, postscale, rows, device, ()):
                    terms, signature = known
                    submission = prepare_submission(name, terms, given, out, self._rank, self._size)
                    if repeated is None and not self._is_checked:
                        repeat = repeat_of(self._cycle, submission, signature)
                        if repeat is not None:
                            self._repeats[name] = arguments, repeat
                    return self._submit(submission, signature, waits)
        terms = normal_terms(kind, dtype, shape, op, root, prescale, postscale, rows, device)
        return self._submit_new(name, kind.name, terms, given, out, waits)

    def submit_group(
        self,
        kind: Kind,
        xs: Sequence[ResultT],
        name: str | None,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outs: Sequence[Any] | None = None,
        waits: bool = False,
        device: str = "cpu",
    ) -> Handle[list[ResultT]]:
        """Submit several tensors under one name; they run when all ranks have submitted all of them.

        `kind`: all-reduce, all-gather or reduce-scatter. `outs`: of an all-reduce, receive the results. `wait()`
        returns the list of results. Otherwise as `submit`.
        """
        given = tuple(operand(x) for x in xs)
        if not given:
            nothing: Handle[list[ResultT]] = Handle(self._cycle)
            nothing.result = []
            nothing.complete()
            return nothing
        first, *others = given
        more = tuple(TensorType(each.dtype, each.shape) for each in others)
        terms = normal_terms(kind, first.dtype, first.shape, op, -1, prescale, postscale, (), device, more)
        return self._submit_new(name, f"grouped_{kind.name}", terms, given, outs, waits, is_group=True)

    def _submit_new(
        self,
        name: str | None,
        sort: str,
        terms: RequestTerms,
        given: tuple[Operand, ...],
        out: Any,
        waits: bool,
        is_group: bool = False,
    ) -> Handle:
        """Check and submit an operation that differs from the last one of its name."""
        check_request(terms, given, out, self._size)
        for each in {each.dtype for each in given} or {terms.dtype}:
            self._check(terms, each)
        signature = signature_of(terms)
        if name is not None:
            check_name(name)
            if len(self._known) >= _KNOWN:
                self._known.clear()
                self._repeats.clear()
            self._repeats.pop(name, None)
            if not is_group:
                self._known[name] = terms, signature
            return self._submit(
                prepare_submission(name, terms, given, out, self._rank, self._size, is_group),
                signature,
                waits,
            )
        unnamed = self._unnamed.get(sort) or self._unnamed.setdefault(sort, _UnnamedNames(sort))
        with unnamed.lock:
            submission = prepare_submission(
                unnamed.next_name(), terms, given, out, self._rank, self._size, is_group
            )
            return unnamed.remember(self._submit(submission, signature, waits, has_name=False))

    def prepare(
        self, x: Any, name: str, op: ReduceOp, prescale: float, postscale: float
    ) -> Callable[[bool], Handle]:
        """Return `submit(waits)` for a repeated all-reduce in place of this memory.

        `x`: a contiguous array. All checks and preparations happen here; otherwise as `submit`.
        """
        given = operand(x)
        check_name(name)
        terms = normal_terms(Allreduce, given.dtype, given.shape, op, -1, prescale, postscale, (), "cpu")
        check_request(terms, (given,), x, self._size)
        self._check(terms, terms.dtype)
        signature = signature_of(terms)
        submission = prepare_submission(name, terms, (given,), x, self._rank, self._size)
        if self._is_checked:
            return lambda waits: self._submit(submission, signature, waits)
        memory, submit_hot, misses = address(given.memory), self._cycle.submit, self._misses

        def submit(waits: bool) -> Handle:
            if name in misses:
                return self._negotiator.submit(submission, signature, waits)
            handle = submit_hot(name, memory, memory, signature, waits, x, submission)
            return handle if handle is not None else self._negotiator.submit(submission, signature, waits)

        return submit

    def _check(self, terms: RequestTerms, dtype: DType) -> None:
        """Raise UsageError if no backend supports the operation."""
        if terms.op is Adasum:
            self._comm.check_adasum(dtype)
        self._backends.check(terms.kind, dtype, terms.op, terms.device)

    # Joining and leaving

    def join(self) -> int:
        """Contribute neutral elements to the operations of other ranks until all have joined; return the last rank."""
        return self._negotiator.join()

    def close(self) -> None:
        """Leave; pending operations of other ranks that need this rank fail there."""
        self._negotiator.announce_leave()
        if self._cycle.is_stepping():
            # Called by a signal handler in the middle of a collective, which is aborted.
            self._stalls.close(waits=False)
            self._comm.shutdown()
            self._cycle.stop()
            return
        self._negotiator.wait_until_all_know()
        self._stalls.close()
        self._cycle.stop()
        self._comm.shutdown()
        self._negotiator.join_thread()
        self._backends.close(failed=False)
        self._cycle.release()
        self._negotiator.on_failure = lambda: None  # the closure would keep this engine and its memory alive

    def abandon(self) -> None:
        """In a forked child: refuse all operations, and leave the parent's resources alone."""
        self._cycle.abandon()
        self._stalls.abandon()


def _fusion_buffer_bytes(settings: Settings, is_tuned: bool) -> int:
    """Return the size of the fusion buffer: the largest size that tuning may choose, or that of the settings."""
    return max(settings.fusion_bytes, LARGEST_FUSION_BYTES) if is_tuned else settings.fusion_bytes


class _UnnamedNames:
    """Generates names for operations without one, of one sort: numbered in the order of submission, in a cycle."""

    def __init__(self, sort: str) -> None:
        self.lock = threading.RLock()
        self._sort = sort
        self._count = 0
        # Weak references: a name alone does not keep the handle of its operation alive.
        self._handles: list[Callable[[], Handle | None]] = [lambda: None] * _UNNAMED_IN_FLIGHT

    def next_name(self) -> str:
        """Return the next name, once the operation that last had it is done."""
        earlier = self._handles[self._count % _UNNAMED_IN_FLIGHT]()
        if earlier is not None and not earlier.done():
            earlier.wait()
        return f"{self._sort}.noname.{self._count % _UNNAMED_IN_FLIGHT}"

    def remember(self, handle: Handle) -> Handle:
        """Store the handle of the operation that has been submitted under `next_name`, and return it."""
        self._handles[self._count % _UNNAMED_IN_FLIGHT] = weakref.ref(handle)
        self._count += 1
        return handle
