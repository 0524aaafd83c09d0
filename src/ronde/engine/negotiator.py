"""One rank's part in agreeing what runs: it drives the machines of `core.negotiation` and feeds the native hot path.

A submitted tensor takes one of two ways:
  - Hit: the native cycle knows its name and signature. It sets a bit, and no Python runs any more until somebody waits.
  - Miss: it becomes a Request, and the next cold round takes it along. In a cold round the engine's threads of all
    ranks gather their requests on rank 0 (`negotiation_rounds`), whose Coordinator makes of them a stream of items;
    everybody gets the stream and applies it item by item. Caches change nowhere else, so they are the same everywhere.

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
from ronde.comm.byte_exchange import broadcast_bytes
from ronde.comm.communicator import Communicator
from ronde.comm.stacks import call_site
from ronde.core.messages import (
    AllJoined,
    Evict,
    FailTensor,
    Joined,
    Leaving,
    Run,
    StreamItem,
    Tune,
    decode_stream,
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
    Requester,
)
from ronde.engine.fresh_errors import fresh
from ronde.engine.negotiation_rounds import Collector, sent_by
from ronde.engine.submission import Submission, address, result_rows, signature_of
from ronde.engine.tuner import Tuner, take_over
from ronde.errors import MismatchError, PeerLostError, UsageError
from ronde.types import Allgather, Alltoall, Barrier, Broadcast, Kind

__all__ = ["Negotiator"]

_log = logging.getLogger("ronde.engine")

_LEAVE_PATIENCE_S = 1.0  # so long a rank that shuts down waits until everybody begins to listen
_ROUND_PATIENCE_S = 30.0  # and so long until all have heard of it


class Negotiator:
    """The shell around a Member (and on rank 0 the Coordinator), with the thread that makes the cold rounds."""

    def __init__(
        self,
        comm: Communicator,
        cycle: _native.Cycle,
        names: Sequence[int],
        arity: int,
        capacity: int,
        divides_by_all: bool,
        tuner: Tuner | None,
    ) -> None:
        """`names`: by rank, how messages call it. `tuner`: of rank 0, if there is one. The caller starts `thread`."""
        self._comm, self._cycle, self._names = comm, cycle, names
        self._rank, self._size, self._hosts = comm.rank, comm.size, comm.hosts
        self._collector = Collector(comm, arity)
        self._tuner = tuner
        self._coordinator = Coordinator(self._size, capacity, names) if self._rank == 0 else None
        self._requester = Requester(self._rank, self._size)
        self._lock = threading.RLock()
        self.cold: dict[str, Handle] = {}  # what is in flight as a miss
        self._joined: set[int] = set()
        self._joining: Handle | None = None  # of this rank
        self._divides_by_all = divides_by_all
        self.on_resume: Callable[[], object] = lambda: None  # all ranks have joined, and begin again
        self.on_failure: Callable[[], object] = lambda: None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._decided: list[str] = []  # what this rank has submitted of what runs next
        self._has_decided = False
        self._is_in_round = False
        self._is_ending = False
        self.thread = threading.Thread(target=self._run_thread, name="ronde-engine", daemon=True)

    def submit(
        self, submission: Submission, signature: _native.Signature, waits: bool, has_name: bool = True
    ) -> Handle:
        if self._failure is not None:
            raise fresh(self._failure)
        if submission.name in self.cold:
            raise UsageError(
                f"tensor '{submission.name}' is in flight already: wait for it before it is submitted again"
            )
        if submission.goals is not None:
            handle = self._submit_hot(submission, signature, waits)
            if handle is not None:
                return handle
        with self._lock:  # between cold rounds, where what is cached does not change
            if self._failure is not None:
                raise fresh(self._failure)
            known = self._requester.cached_response(submission.name)
            if known is not None:
                request, run, _ = known
                if request == submission.terms.request(submission.name):
                    submission = submission.with_goals(run.rows, self._rank, self._size)
                # Also if it does not fit: perhaps the name is in flight.
                handle = self._submit_hot(submission, signature, waits)
                if handle is not None:
                    self._tell_splits(handle, submission.terms.kind, run)
                    return handle
            return self._submit_cold(submission, has_name)

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

    def _submit_cold(self, submission: Submission, has_name: bool) -> Handle:
        # The root of a broadcast often has a line for itself, and a barrier has no array that could be the wrong one.
        is_compared = not has_name and submission.terms.kind not in (Broadcast, Barrier)
        self._requester.submit(submission.terms.request(submission.name), call_site() if is_compared else "")
        handle = Handle(self._cycle)
        handle.inputs = submission
        self._cycle.record_submitted(submission.name, submission.terms.kind)
        self._add_cold(submission, handle)
        return handle

    def _add_cold(self, submission: Submission, handle: Handle) -> None:
        self.cold[submission.name] = handle
        self._cycle.note_miss(submission.name, submission.terms.kind, handle)
        self._cycle.want_cold()

    def _tell_splits(self, handle: Handle, kind: Kind, run: Run) -> None:
        if kind is Alltoall:
            handle.received_splits = list(result_rows(kind, run.rows, self._rank, self._size))

    def _run_thread(self) -> None:
        try:
            while self._cycle.run():
                self._is_in_round = True
                self._cold_round()
                self._is_in_round = self._is_ending  # the last is to follow at once
            if self._failure is None:  # nobody has answered while this rank took leave
                rank, host = self._names[self._rank], self._hosts[self._rank]
                raise PeerLostError(f"rank {rank} on {host} has shut down", rank, host)
        except BaseException as error:
            self._fail_engine(error)

    def _cold_round(self) -> None:
        self._cycle.begin_cold()
        with self._lock:
            if self._requester.takes_back_hits:
                self._take_back_hits()
            requests = self._requester.take_outbox()
        batches = self._collector.collect(requests)
        stream = b""
        if self._coordinator is not None:
            if self._tuner is not None:
                self._tuner.exchange_with(self._coordinator)
            stream = encode_stream(self._coordinator.step_merged(batches, self._cycle.take_used()))
            for warning in self._coordinator.take_warnings():
                _log.warning("%s", warning)
        with sent_by(self._comm, 0):
            self._apply_stream(decode_stream(broadcast_bytes(self._comm, stream)))
        self._run_decided()
        self._cycle.end_cold()

    def _apply_stream(self, items: Sequence[StreamItem]) -> None:
        for item in items:
            # Tensors that follow each other run together, on all ranks alike. Evictions and refusals concern others.
            if not isinstance(item, Run | Evict | FailTensor):
                self._run_decided()
            with self._lock:
                for effect in self._requester.apply_item(item):
                    self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """Do what an item of the stream asks for, with the lock held."""
        match effect:
            case Execute():
                self._add_decided(effect)
            case Contribute(run):
                self._add_cold_run(run, signature_of(run.request), [], [], True)
            case Insert(slot, request, run):
                self._cycle.insert(slot, request.name, signature_of(request), run.rows)
            case Evicted(slot):
                self._displace(self._cycle.evict(slot))
            case Failed(request, reason, left):
                if left < 0:  # else all that is pending fails, in a moment
                    self._cycle.record_refused(request.name)
                    self.cold.pop(request.name).fail(MismatchError(reason))
            case _:
                self._perform_for_all(effect)

    def _perform_for_all(self, effect: Effect) -> None:
        match effect:
            case Joined(ranks):
                self._joined.update(ranks)
                if not self._divides_by_all:
                    self._cycle.set_contributors(self._size - len(self._joined))
                if self._rank in ranks:
                    self._cycle.absent()
            case AllJoined(last):
                self._resume_after(last)
            case Tune():
                take_over(self._cycle, effect, self._tuner)
            case Leaving():
                self._is_ending = True
                self._cycle.want_cold()
            case Closed(rank):
                self._stop_after(rank)

    def _displace(self, handle: Handle | None) -> None:
        """What was submitted as a hit, and not decided, is requested again."""
        if handle is None:
            return
        submission: Submission = handle.inputs
        self._requester.request_again(submission.terms.request(submission.name))
        self._add_cold(submission, handle)

    def _add_decided(self, effect: Execute) -> None:
        """Add a tensor, of which all ranks have just heard that it is ready, to what runs next."""
        request, run = effect.request, effect.run
        handle = self.cold[request.name]
        submission: Submission = handle.inputs
        if submission.terms.kind in (Allgather, Alltoall):
            # Of a hit that was displaced: the sizes may be others now.
            submission = submission._replace(goals=None)
        submission = submission.with_goals(run.rows, self._rank, self._size)
        self._add_cold_run(
            run, signature_of(submission.terms), submission.sources, submission.destinations, False
        )
        if submission.goals:
            handle.result = submission.result
        if submission.needs_finish:
            handle.finish = lambda _: submission.finish()
        self._tell_splits(handle, request.kind, run)
        self._decided.append(request.name)

    def _add_cold_run(
        self, run: Run, signature: _native.Signature, sources: list[Any], goals: list[Any], is_absent: bool
    ) -> None:
        self._cycle.add_cold(
            run.request.name, signature, run.rows, sources, goals, self._contributors(run), is_absent
        )
        self._has_decided = True

    def _run_decided(self) -> None:
        if not self._has_decided:
            return
        self._has_decided = False
        self._cycle.run_cold()
        with self._lock:
            handles = [self.cold.pop(name) for name in self._decided]
            self._decided.clear()
        for handle in handles:
            handle.complete()

    def _contributors(self, run: Run) -> int:
        return self._size if self._divides_by_all else self._size - len(run.absent)

    def join(self) -> int:
        """Contribute neutral elements to what others submit until all ranks have joined; return the last that did."""
        with self._lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._requester.announce_join()
            self._cycle.join()
            handle = self._joining = Handle(self._cycle)
            self._cycle.want_cold()
        last: int = handle.wait()
        return last

    def _take_back_hits(self) -> None:
        for slot in self._requester.cached_names():
            self._displace(self._cycle.take_back(slot))

    def _resume_after(self, last: int) -> None:
        """All have joined, and submit again; tensors without names count from the beginning, as ranks may differ."""
        self._joined.clear()
        self.on_resume()
        self._cycle.set_contributors(self._size)
        self._cycle.resume()
        if self._joining is not None:
            self._joining.result = last
            self._joining.complete()
            self._joining = None

    def _stop_after(self, rank: int) -> None:
        name, host = self._names[rank], self._hosts[rank]
        why = (
            "it has failed, or submits fewer operations than this rank; if ranks have different numbers of batches, "
            "call join() after the last one"
        )
        begin = f"rank {name} on {host} has shut down"
        self._failure = PeerLostError(f"{begin} and takes part in nothing more: {why}", name, host)
        self._cycle.give_up(rank, str(self._failure))
        for tensor, handle in self.cold.items():
            handle.fail(PeerLostError(f"{begin} before tensor '{tensor}' could run: {why}", name, host))
        self.cold.clear()
        self._fail_pending(self._failure)
        self._closed.set()
        self._cycle.stop()

    def _fail_pending(self, error: BaseException) -> None:
        for handle in self.cold.values():
            handle.fail(error)
        self.cold.clear()
        if self._joining is not None:
            self._joining.fail(error)

    def _fail_engine(self, error: BaseException) -> None:
        if not self._comm.has_failed() and not isinstance(error, PeerLostError):
            _log.error("the engine failed", exc_info=error)
            self._comm.abort(f"the engine failed: {error!r}")
        with self._lock:
            self._failure = self._failure or error
            self._cycle.give_up(self._rank, str(error))
            self._fail_pending(error)
        self.on_failure()
        self._closed.set()

    def announce_leave(self) -> None:
        """Say in the next cold round that this rank submits nothing more."""
        with self._lock:
            if self._failure is None:
                self._requester.announce_leave()
                self._cycle.want_cold()

    def join_thread(self) -> None:
        """Wait for the end of the threads; the cycle has been stopped."""
        self.thread.join()
        if self._tuner is not None:
            self._tuner.close()

    def wait_until_all_know(self) -> None:
        """Wait for the last round: patiently once they listen, because then one of the others is busy."""
        until = time.monotonic() + _ROUND_PATIENCE_S
        while not self._closed.wait(_LEAVE_PATIENCE_S) and self._is_in_round and time.monotonic() < until:
            pass
