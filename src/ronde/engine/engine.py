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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ronde import _native
from ronde._native import Handle
from ronde.comm.affinity import starting_threads_on
from ronde.comm.arrays import Operand, operand
from ronde.comm.communicator import Communicator
from ronde.core.messages import (
    AllJoined,
    Joined,
    Run,
    TensorType,
    Tune,
    decode_requests,
    decode_stream,
    encode_requests,
    encode_stream,
)
from ronde.core.negotiation import (
    Closed,
    Contribute,
    Coordinator,
    Effect,
    Evicted,
    Execute,
    Failed,
    Insert,
    Member,
)
from ronde.engine.agreement import agree_on_settings
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
from ronde.engine.tuner import begin_tuning, buffer_bytes, take_over
from ronde.engine.unnamed import Unnamed
from ronde.errors import MismatchError, PeerLostError, UsageError
from ronde.settings import Settings
from ronde.types import Allgather, Allreduce, Alltoall, Barrier, DType, Kind, ReduceOp

__all__ = ["Engine"]

_log = logging.getLogger("ronde.engine")

_LEAVE_PATIENCE_S = 1.0  # so long a rank that shuts down waits until everybody begins to listen
_ROUND_PATIENCE_S = 30.0  # and so long until all have heard of it
_KNOWN = 2**16  # names that change all the time must not fill the memory


class Engine:
    """One per process and world. Every rank of the world makes one, in the same place of its program."""

    def __init__(
        self, comm: Communicator, settings: Settings, core: int | None, ranks: Sequence[int] | None = None
    ) -> None:
        """`comm`: its own, which it shuts down. `core`: of its thread, None for any. `ranks`: those of the world that
        it is for, for messages, if not for all.
        """
        capacity = settings.cache_capacity
        self._rank, self._size, self._hosts = comm.rank, comm.size, comm.hosts
        self._names = range(comm.size) if ranks is None else ranks
        self._comm = comm
        agree_on_settings(comm, settings)
        is_tuned = settings.autotune and ranks is None
        board = self._comm.empty(_native.board_bytes(capacity), np.uint8)
        buffer = self._comm.empty(buffer_bytes(settings, is_tuned), np.uint8)
        self._cycle = _native.Cycle(
            self._comm._native,
            board,
            capacity,
            buffer,
            settings.linger_ns,
            settings.disable_group_fusion,
        )
        with starting_threads_on(core):
            self._tuner = begin_tuning(self._cycle, comm, settings, is_tuned)
        self._comm.barrier()  # from here on everybody listens, and nobody's notes are lost
        self._coordinator = Coordinator(self._size, capacity, self._names) if self._rank == 0 else None
        self._member = Member(self._rank, self._size)
        self._lock = threading.RLock()
        self._cold: dict[str, Handle] = {}
        self._known: dict[str, tuple[Terms, _native.Signature]] = {}  # as they were last submitted
        self._unnamed: dict[str, Unnamed] = {}
        self._joined: set[int] = set()
        self._joining: Handle | None = None  # of this rank
        self._divides_by_all = settings.join_average == "all"
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._is_in_round = False
        self._thread = threading.Thread(target=self._run, name="ronde-engine", daemon=True)
        with starting_threads_on(core):
            self._thread.start()

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
        ValueError for a name that is in flight, UsageError for what makes no sense, PeerError if the world has failed.
        What ranks disagree about is raised by `wait()` on all of them.
        """
        given = () if kind is Barrier else (operand(x),)
        dtype, shape = (given[0].dtype, given[0].shape) if given else (DType.uint8, ())
        rows = () if kind is not Alltoall else normal_splits(splits, shape[0] if shape else 0, self._size)
        if name is not None:
            known = self._known.get(name)
            if known is not None:
                if known[0] == (kind, dtype, shape, op, root, prescale, postscale, rows, device, ()):
                    terms, signature = known
                    submission = prepare(name, terms, given, out, self._rank, self._size)
                    return self._submit(submission, signature, waits)
        terms = normal_terms(kind, dtype, shape, op, root, prescale, postscale, rows, device)
        return self._submit_new(name, kind.name, terms, given, out, waits)

    def submit_group(
        self,
        kind: Kind,
        xs: Sequence[Any],
        name: str | None,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outs: Sequence[Any] | None = None,
        waits: bool = False,
        device: str = "cpu",
    ) -> Handle:
        """Submit several tensors under one name; they run when all ranks have submitted all of them.

        `kind`: all-reduce, all-gather or reduce-scatter. `outs`: of an all-reduce, where the results go. `wait()`
        returns the list of results. Otherwise as `submit`.
        """
        given = tuple(operand(x) for x in xs)
        if not given:
            nothing = Handle(self._cycle)
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
        terms: Terms,
        given: tuple[Operand, ...],
        out: Any,
        waits: bool,
        is_group: bool = False,
    ) -> Handle:
        """Submit what has not been submitted before just like this."""
        check(terms, given, out, self._size)
        signature = signature_of(terms)
        if name is not None:
            check_name(name)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            if not is_group:
                self._known[name] = terms, signature
            return self._submit(
                prepare(name, terms, given, out, self._rank, self._size, is_group), signature, waits
            )
        unnamed = self._unnamed.get(sort) or self._unnamed.setdefault(sort, Unnamed(sort))
        with unnamed.lock:
            submission = prepare(unnamed.next_name(), terms, given, out, self._rank, self._size, is_group)
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
        check(terms, (given,), x, self._size)
        signature = signature_of(terms)
        submission = prepare(name, terms, (given,), x, self._rank, self._size)
        memory, submit_hot, cold = address(given.memory), self._cycle.submit, self._cold

        def submit(waits: bool) -> Handle:
            if name in cold:
                return self._submit(submission, signature, waits)
            handle = submit_hot(name, memory, memory, signature, waits, x, submission)
            return handle if handle is not None else self._submit(submission, signature, waits)

        return submit

    def _submit(self, submission: Submission, signature: _native.Signature, waits: bool) -> Handle:
        if self._failure is not None:
            raise self._failure.with_traceback(
                None
            )  # that of others who have met it would keep their frames alive
        if submission.name in self._cold:
            raise UsageError(
                f"tensor '{submission.name}' is in flight already: wait for it before it is submitted again"
            )
        if submission.goals is not None:
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
                    submission = submission.with_goals(run.rows, self._rank, self._size)
                # Also if it does not fit: perhaps the name is in flight.
                handle = self._submit_hot(submission, signature, waits)
                if handle is not None:
                    self._tell_splits(handle, submission.terms.kind, run)
                    return handle
            return self._submit_cold(submission)

    def _submit_hot(self, submission: Submission, signature: _native.Signature, waits: bool) -> Handle | None:
        given, goals = submission.given, submission.goals
        if not given or not goals:
            return self._cycle.submit(submission.name, None, None, signature, waits, None, submission)
        if submission.is_group:
            handle = self._cycle.submit_group(
                submission.name,
                submission.sources,
                submission.destinations,
                signature,
                waits,
                submission.result,
                submission,
            )
            if handle is not None and submission.needs_finish:
                handle.finish = lambda _: submission.finish()
            return handle
        [goal] = goals
        source = given[0].memory
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
                rank, host = self._names[self._rank], self._hosts[self._rank]
                raise PeerLostError(f"rank {rank} on {host} has shut down", rank, host)
        except BaseException as error:
            self._fail(error)

    def _cold_round(self) -> None:
        with self._lock:
            if self._member.is_joining:
                self._take_back_hits()
            requests = self._member.outbox()
        gathered = gather_bytes(self._comm, encode_requests(requests))
        stream = b""
        if self._coordinator is not None:
            batch = [decode_requests(message) for message in gathered]
            if self._tuner is not None:
                self._tuner.meet(self._coordinator)
            stream = encode_stream(self._coordinator.step(batch, self._cycle.take_used()))
        for item in decode_stream(share_bytes(self._comm, stream)):
            with self._lock:
                effects = self._member.apply(item)
                for effect in effects:
                    self._apply(effect)
            for effect in effects:
                if isinstance(effect, Execute):
                    self._execute(effect)
                elif isinstance(effect, Contribute):
                    run = effect.run
                    self._cycle.run_now(
                        signature_of(run.request), run.rows, [], [], self._contributors(run), True
                    )
        self._cycle.end_cold()

    def _apply(self, effect: Effect) -> None:
        """Whatever is quickly done, with the lock held."""
        match effect:
            case Insert(slot, request, run):
                self._cycle.insert(slot, request.name, signature_of(request), run.rows)
            case Evicted(slot):
                self._displace(self._cycle.evict(slot))
            case Failed(request, reason, left):
                if left < 0:  # else all that is pending fails, in a moment
                    self._cold.pop(request.name).fail(MismatchError(reason))
            case Joined(rank):
                self._joined.add(rank)
                if not self._divides_by_all:
                    self._cycle.set_contributors(self._size - len(self._joined))
                if rank == self._rank:
                    self._cycle.absent()
            case AllJoined(last):
                self._go_on_after(last)
            case Tune():
                take_over(self._cycle, effect, self._tuner)
            case Closed(rank):
                self._close(rank)

    def _displace(self, handle: Handle | None) -> None:
        """What was submitted as a hit, and not decided, is requested again."""
        if handle is None:
            return
        submission: Submission = handle.inputs
        self._member.displaced(submission.terms.request(submission.name))
        self._cold[submission.name] = handle
        self._cycle.want_cold()

    def _execute(self, effect: Execute) -> None:
        """Run a tensor of which all ranks have just heard that it is ready."""
        request, run = effect.request, effect.run
        with self._lock:
            handle = self._cold[request.name]
        submission: Submission = handle.inputs
        if submission.terms.kind in (Allgather, Alltoall):
            # Of a hit that was displaced: the sizes may be others now.
            submission = submission._replace(goals=None)
        submission = submission.with_goals(run.rows, self._rank, self._size)
        self._cycle.run_now(
            signature_of(submission.terms),
            run.rows,
            submission.sources,
            submission.destinations,
            self._contributors(run),
            False,
        )
        if submission.goals:
            handle.result = submission.result
        if submission.needs_finish:
            handle.finish = lambda _: submission.finish()
        self._tell_splits(handle, request.kind, run)
        with self._lock:
            del self._cold[request.name]
        handle.complete()

    def _contributors(self, run: Run) -> int:
        return self._size if self._divides_by_all else self._size - len(run.absent)

    # Joining

    def join(self) -> int:
        """Contribute neutral elements to what others submit until all ranks have joined; return the last that did."""
        with self._lock:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._member.join()
            self._cycle.join()
            handle = self._joining = Handle(self._cycle)
            self._cycle.want_cold()
        last: int = handle.wait()
        return last

    def _take_back_hits(self) -> None:
        for slot in self._member.names():
            self._displace(self._cycle.take_back(slot))

    def _go_on_after(self, last: int) -> None:
        """All have joined, and submit again; tensors without names count from the beginning, as ranks may differ."""
        self._joined.clear()
        self._unnamed.clear()
        self._cycle.set_contributors(self._size)
        self._cycle.resume()
        if self._joining is not None:
            self._joining.result = last
            self._joining.complete()
            self._joining = None

    # Endings

    def _close(self, rank: int) -> None:
        name, host = self._names[rank], self._hosts[rank]
        self._failure = PeerLostError(
            f"rank {name} on {host} has shut down and takes part in nothing more", name, host
        )
        self._cycle.give_up(rank, str(self._failure))
        self._fail_pending(self._failure)
        self._closed.set()
        self._cycle.stop()

    def _fail_pending(self, error: BaseException) -> None:
        for handle in self._cold.values():
            handle.fail(error)
        self._cold.clear()
        if self._joining is not None:
            self._joining.fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._comm._native.has_failed() and not isinstance(error, PeerLostError):
            _log.error("the engine failed", exc_info=error)
            self._comm.abort(f"the engine failed: {error!r}")
        with self._lock:
            self._failure = self._failure or error
            self._cycle.give_up(self._rank, str(error))
            self._fail_pending(error)
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
        if self._tuner is not None:
            self._tuner.close()
        self._cycle.release()

    def abandon(self) -> None:
        """In a forked child: refuse everything, and leave what is the parent's alone."""
        self._cycle.abandon()
