"""The engine's shell: it drives the machines of `core.negotiation` and feeds the native hot path.

A submitted tensor takes one of two ways:
  - Hit: the native cycle knows its name and signature. It sets a bit, and no Python runs any more until somebody waits.
  - Miss: it becomes a Request, and the next cold round takes it along. In a cold round the engine's threads of all
    ranks gather their requests on rank 0, whose Coordinator makes of them a stream of items; everybody gets the stream
    and applies it item by item. Caches change nowhere else, so they are the same everywhere.

The lock orders submitting threads against cold rounds; it is never held while a rank waits for another.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ronde import _native
from ronde._native import Handle
from ronde.comm.arrays import Operand, operand
from ronde.comm.communicator import Communicator
from ronde.core.messages import Run, decode_requests, decode_stream, encode_requests, encode_stream
from ronde.core.negotiation import Closed, Coordinator, Effect, Evicted, Execute, Failed, Insert, Member
from ronde.engine.rounds import gather_bytes, share_bytes
from ronde.engine.submission import (
    Submission,
    Terms,
    address,
    check,
    check_name,
    normal_splits,
    normal_terms,
    prepare,
    result_rows,
    signature_of,
)
from ronde.engine.timeline import Timeline
from ronde.errors import MismatchError, PeerLostError, UsageError
from ronde.settings import Settings
from ronde.types import Allgather, Allreduce, Alltoall, Barrier, DType, Kind, ReduceOp

__all__ = ["Engine"]

_log = logging.getLogger("ronde.engine")

_UNNAMED = 64  # so many tensors without a name may be in flight, of each kind
_LEAVE_PATIENCE_S = 1.0  # so long a rank that shuts down waits until everybody begins to listen
_ROUND_PATIENCE_S = 30.0  # and so long until all have heard of it
_KNOWN = 2**16  # names that change all the time must not fill the memory


class Engine:
    """One per process and world. Every rank of the world makes one, in the same place of its program."""

    def __init__(self, world: Communicator, settings: Settings) -> None:
        capacity = settings.cache_capacity
        self._rank, self._size, self._hosts = world.rank, world.size, world.hosts
        self._comm = world.duplicate()
        self._agree("cache_capacity", capacity)
        self._agree("fusion_bytes", settings.fusion_bytes)
        board = self._comm.empty(_native.board_bytes(capacity), np.uint8)
        buffer = self._comm.empty(settings.fusion_bytes, np.uint8)
        self._cycle = _native.Cycle(self._comm._native, board, capacity, buffer, settings.linger_ns)
        self.timeline = Timeline(self._rank, self._size, self._hosts[self._rank])
        self._cycle.record_into(self.timeline.native, "", range(self._size))
        self._comm.barrier()  # from here on everybody listens, and nobody's notes are lost
        self._coordinator = Coordinator(self._size, capacity) if self._rank == 0 else None
        self._member = Member(self._rank, self._size)
        self._lock = threading.RLock()
        self._cold: dict[str, Handle] = {}
        self._known: dict[str, tuple[Terms, _native.Signature]] = {}  # as they were last submitted
        self._unnamed: dict[Kind, _Unnamed] = {}
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._is_in_round = False
        self.timeline.start_as_set(settings)
        self._thread = threading.Thread(target=self._run, name="ronde-engine", daemon=True)
        self._thread.start()

    def _agree(self, setting: str, value: int) -> None:
        values = self._comm.allgather(np.array([value])).tolist()
        for rank, other in enumerate(values):
            if other != values[0]:
                raise MismatchError(
                    f"the setting {setting} must be the same on all ranks: it is {values[0]} on rank 0 and {other} on "
                    f"rank {rank}"
                )

    # Submitting

    def submit(
        self,
        kind: Kind,
        x: Any,
        name: str | None,
        op: ReduceOp,
        root: int,
        prescale: float,
        postscale: float,
        splits: Sequence[int] | None,
        out: Any,
        waits: bool,
        device: str = "cpu",
    ) -> Handle:
        """Submit a tensor; return its handle.

        `x`: any array (None for a barrier); it must not change until the handle is done. `name`: the same on all ranks;
        None numbers the tensors of a kind in the order in which they are submitted. `op`, `prescale`, `postscale`: of
        reductions; `root`: of a broadcast; `splits`: of an all-to-all. `out`: takes the result, may be `x`. `waits`:
        the caller calls `wait()` at once. `device`: where the program has the tensor of which `x` is a copy. Raises
        ValueError for a name that is in flight, UsageError for what makes no
        sense, PeerError if the world has failed. What ranks disagree about is raised by `wait()` on all of them.
        """
        given = None if kind is Barrier else operand(x)
        dtype, shape = (DType.uint8, ()) if given is None else (given.dtype, given.shape)
        rows = () if kind is not Alltoall else normal_splits(splits, shape[0] if shape else 0, self._size)
        if name is not None:
            known = self._known.get(name)
            if known is not None:
                terms, signature = known
                if terms == (kind, dtype, shape, op, root, prescale, postscale, rows, device):
                    return self._submit(
                        prepare(name, terms, given, out, self._rank, self._size), signature, waits
                    )
        terms = normal_terms(kind, dtype, shape, op, root, prescale, postscale, rows, device)
        signature = self._admit(terms, given, out)
        if name is not None:
            check_name(name)
            self._remember(name, terms, signature)
            return self._submit(prepare(name, terms, given, out, self._rank, self._size), signature, waits)
        unnamed = self._unnamed.get(kind) or self._unnamed.setdefault(kind, _Unnamed(kind))
        with unnamed.lock:
            submission = prepare(unnamed.next_name(), terms, given, out, self._rank, self._size)
            return unnamed.remember(self._submit(submission, signature, waits))

    def prepare(
        self, x: Any, name: str, op: ReduceOp, prescale: float, postscale: float
    ) -> Callable[[bool], Handle]:
        """Return `submit(waits)` for an all-reduce in place that is going to be repeated, always of this memory.

        `x`: a contiguous array. All that can be done beforehand is done here; the rest is as in `submit`.
        """
        given = operand(x)
        check_name(name)
        terms = normal_terms(Allreduce, given.dtype, given.shape, op, -1, prescale, postscale, (), "cpu")
        signature = self._admit(terms, given, x)
        submission = prepare(name, terms, given, x, self._rank, self._size)
        memory, submit_hot, cold = address(given.memory), self._cycle.submit, self._cold

        def submit(waits: bool) -> Handle:
            if name in cold:
                return self._submit(submission, signature, waits)
            handle = submit_hot(name, memory, memory, signature, waits, x, submission)
            return handle if handle is not None else self._submit(submission, signature, waits)

        return submit

    def _admit(self, terms: Terms, given: Operand | None, out: Any) -> _native.Signature:
        check(terms, given, out, self._size)
        return signature_of(terms)

    def _remember(self, name: str, terms: Terms, signature: _native.Signature) -> None:
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[name] = terms, signature

    def _submit(self, submission: Submission, signature: _native.Signature, waits: bool) -> Handle:
        if self._failure is not None:
            raise self._failure.with_traceback(
                None
            )  # that of others who have met it would keep their frames alive
        if submission.name in self._cold:
            raise UsageError(
                f"tensor '{submission.name}' is in flight already: wait for it before it is submitted again"
            )
        if submission.goal is not None:
            handle = self._submit_hot(submission, signature, waits)
            if handle is not None:
                return handle
        with self._lock:  # between cold rounds, where what is cached does not change
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            known = self._member.lookup(submission.name)
            if known is not None:
                request, run, _ = known
                if request == submission.terms.request(submission.name):
                    submission = submission.with_goal(run.rows, self._rank, self._size)
                # Also if it does not fit: perhaps the name is in flight.
                handle = self._submit_hot(submission, signature, waits)
                if handle is not None:
                    self._tell_splits(handle, submission.terms.kind, run)
                    return handle
            return self._submit_cold(submission)

    def _submit_hot(self, submission: Submission, signature: _native.Signature, waits: bool) -> Handle | None:
        given, goal = submission.given, submission.goal
        if given is None or goal is None:
            return self._cycle.submit(submission.name, None, None, signature, waits, None, submission)
        source = given.memory
        if type(source) is not np.ndarray:
            source = address(source)
        destination = goal.memory
        if type(destination) is not np.ndarray:
            destination = address(destination)
        handle = self._cycle.submit(
            submission.name, source, destination, signature, waits, goal.result, submission
        )
        if handle is not None and (goal.is_copy or goal.refusal is not None):
            handle.finish = lambda _: goal.finish()
        return handle

    def _submit_cold(self, submission: Submission) -> Handle:
        self._member.submit(submission.terms.request(submission.name))
        handle = Handle(self._cycle)
        handle.inputs = submission
        self._cold[submission.name] = handle
        self._cycle.record_submitted(submission.name)
        self._cycle.want_cold()
        return handle

    def _tell_splits(self, handle: Handle, kind: Kind, run: Run) -> None:
        if kind is Alltoall:
            handle.received_splits = list(result_rows(kind, run.rows, self._rank, self._size))

    # The engine's thread

    def _run(self) -> None:
        try:
            while self._cycle.run():
                self._is_in_round = True
                self._cold_round()
                self._is_in_round = False
            if self._failure is None:  # nobody has answered while this rank took leave
                host = self._hosts[self._rank]
                raise PeerLostError(f"rank {self._rank} on {host} has shut down", self._rank, host)
        except BaseException as error:
            self._fail(error)

    def _cold_round(self) -> None:
        with self._lock:
            requests = self._member.outbox()
        gathered = gather_bytes(self._comm, encode_requests(requests))
        stream = b""
        if self._coordinator is not None:
            batch = [decode_requests(message) for message in gathered]
            stream = encode_stream(self._coordinator.step(batch, self._cycle.take_used()))
        for item in decode_stream(share_bytes(self._comm, stream)):
            with self._lock:
                effects = self._member.apply(item)
                for effect in effects:
                    self._apply(effect)
            for effect in effects:
                if isinstance(effect, Execute):
                    self._execute(effect)
        self._cycle.end_cold()

    def _apply(self, effect: Effect) -> None:
        """Whatever is quickly done, with the lock held."""
        match effect:
            case Insert(slot, request, run):
                self._cycle.insert(slot, request.name, signature_of(request), run.rows)
            case Evicted(slot):
                handle = self._cycle.evict(slot)
                if handle is not None:
                    submission: Submission = handle.inputs
                    self._member.displaced(submission.terms.request(submission.name))
                    self._cold[submission.name] = handle
                    self._cycle.want_cold()
            case Failed(request, reason, left):
                if left < 0:  # else all that is pending fails, in a moment
                    self._cycle.record_refused(request.name)
                    self._cold.pop(request.name).fail(MismatchError(reason))
            case Closed(rank):
                self._close(rank)

    def _execute(self, effect: Execute) -> None:
        """Run a tensor of which all ranks have just heard that it is ready."""
        request, run = effect.request, effect.run
        with self._lock:
            handle = self._cold[request.name]
        submission: Submission = handle.inputs
        if submission.terms.kind in (Allgather, Alltoall):
            submission = submission._replace(
                goal=None
            )  # of a hit that was displaced: the sizes may be others now
        submission = submission.with_goal(run.rows, self._rank, self._size)
        given, goal = submission.given, submission.goal
        source = None if given is None else address(given.memory)
        destination = None if goal is None else address(goal.memory)
        self._cycle.record_decided(request.name)
        self._cycle.run_now(signature_of(submission.terms), run.rows, source, destination)
        if goal is not None:
            handle.result = goal.result
            handle.finish = lambda _: goal.finish()
        self._tell_splits(handle, request.kind, run)
        with self._lock:
            del self._cold[request.name]
        handle.complete()

    # Endings

    def _close(self, rank: int) -> None:
        who = f"rank {rank} on {self._hosts[rank]}"
        self._failure = PeerLostError(
            f"{who} has shut down and takes part in nothing more", rank, self._hosts[rank]
        )
        self._cycle.give_up(rank, str(self._failure))
        for handle in self._cold.values():
            handle.fail(self._failure)
        self._cold.clear()
        self._closed.set()
        self._cycle.stop()

    def _fail(self, error: BaseException) -> None:
        if not self._comm._native.has_failed() and not isinstance(error, PeerLostError):
            _log.error("the engine failed", exc_info=error)
            self._comm.abort(f"the engine failed: {error!r}")
        with self._lock:
            self._failure = self._failure or error
            self._cycle.give_up(self._rank, str(error))
            for handle in self._cold.values():
                handle.fail(error)
            self._cold.clear()
        self._closed.set()

    def close(self) -> None:
        """Take leave; what is pending on the other ranks and needs this one fails there."""
        with self._lock:
            if self._failure is None:
                self._member.leave()
                self._cycle.want_cold()
        if (
            self._cycle.is_stepping()
        ):  # called by a signal handler, in the middle of a collective: that is aborted
            self._comm.shutdown()
            self._cycle.stop()
            return
        until = time.monotonic() + _ROUND_PATIENCE_S
        while not self._closed.wait(_LEAVE_PATIENCE_S) and self._is_in_round and time.monotonic() < until:
            pass  # the others have heard of it, and one of them is busy
        self._cycle.stop()
        self._comm.shutdown()
        self._thread.join()
        self.timeline.stop()
        self._cycle.release()

    def abandon(self) -> None:
        """In a forked child: refuse everything, and leave what is the parent's alone."""
        self.timeline.native.abandon()
        self._cycle.abandon()


class _Unnamed:
    """Names for the tensors of one kind that come without: numbered in the order of submission, again and again."""

    def __init__(self, kind: Kind) -> None:
        self.lock = threading.RLock()
        self._kind = kind
        self._count = 0
        # What is in flight is kept alive elsewhere; what nobody wants any more is not kept by its name.
        self._handles: list[Callable[[], Handle | None]] = [lambda: None] * _UNNAMED

    def next_name(self) -> str:
        """Return the next name, once it is free again."""
        earlier = self._handles[self._count % _UNNAMED]()
        if earlier is not None and not earlier.done():
            earlier.wait()
        return f"{self._kind.name}.noname.{self._count % _UNNAMED}"

    def remember(self, handle: Handle) -> Handle:
        """The tensor with the latest name has been submitted."""
        self._handles[self._count % _UNNAMED] = weakref.ref(handle)
        self._count += 1
        return handle
