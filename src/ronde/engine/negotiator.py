"""Agrees with the other ranks which tensors run: drives the machines of `engine.negotiation`, and feeds the native
cycle.

A submitted tensor takes one of two ways:
  - Hit: the native cycle knows its name and signature. It sets a bit, and no Python runs until a thread waits.
  - Miss: it becomes a Request for the next negotiation round. There the engine's threads of all ranks gather their
    requests on rank 0 (`Collector`), and its Coordinator turns them into a stream of items. Every rank
    receives the stream and applies it item by item. Only the stream changes caches, so they are equal on all ranks.

On one host, rank 0 gathers the messages of all ranks. On several hosts, the ranks of a host send theirs to its leader,
which merges them with those of its children and sends the result to its parent (`engine.merging`). Everything runs on
the engine's own communicator, and is sealed between hosts.

The lock orders submitting threads and negotiation rounds. No thread holds it while it waits for another rank.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ronde import _native
from ronde._native import Handle
from ronde.comm.byte_exchange import broadcast_bytes, gather_bytes, receive_bytes, send_bytes
from ronde.comm.communicator import Communicator
from ronde.engine.merging import (
    Batch,
    BatchReader,
    batch_of_outboxes,
    children_of,
    encode_batch,
    merge_batches,
    parent_of,
    ranks_under,
)
from ronde.engine.messages import (
    AllJoined,
    Evict,
    FailTensor,
    Joined,
    Leaving,
    Message,
    Run,
    StreamItem,
    Tune,
    decode_stream,
    encode_requests,
    encode_stream,
)
from ronde.engine.negotiation import (
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
from ronde.engine.submission import Submission, address, result_rows, signature_of, submission_of
from ronde.engine.tuner import Tuner, adopt_values
from ronde.errors import MismatchError, PeerLostError, ProtocolError, UsageError
from ronde.stall.stacks import call_site
from ronde.types import Allgather, Alltoall, Barrier, Broadcast, Kind

__all__ = [
    "Collector",
    "Negotiator",
    "fresh",
    "sent_by",
]

_log = logging.getLogger("ronde.engine")

_LEAVE_PATIENCE_S = 1.0  # how long a rank that shuts down waits for the other ranks to begin the round
_ROUND_PATIENCE_S = 30.0  # how long it waits for the end of the round


class Negotiator:
    """The shell around a Requester, and on rank 0 the Coordinator, with the thread of the negotiation rounds."""

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
        """`names`: by rank, its number in messages. `tuner`: rank 0's, if any. The caller starts `thread`."""
        self._comm, self._cycle, self._names = comm, cycle, names
        self._rank, self._size, self._hosts = comm.rank, comm.size, comm.hosts
        self._collector = Collector(comm, arity)
        self._tuner = tuner
        self._coordinator = Coordinator(self._size, capacity, names) if self._rank == 0 else None
        self._requester = Requester(self._rank, self._size)
        self._lock = threading.RLock()
        self.misses: dict[str, Handle] = {}  # in flight, by name
        self._joined: set[int] = set()
        self._joining: Handle | None = None  # of this rank
        self._divides_by_all = divides_by_all
        self.on_resume: Callable[[], object] = lambda: None  # called when all ranks have joined, and resume
        self.on_failure: Callable[[], object] = lambda: None
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._decided: list[str] = []  # this rank's tensors of the run that comes next
        self._has_decided = False
        self._is_in_round = False
        self._is_ending = False
        self.thread = threading.Thread(target=self._run_thread, name="ronde-engine", daemon=True)

    def submit(
        self, submission: Submission, signature: _native.Signature, waits: bool, has_name: bool = True
    ) -> Handle:
        if self._failure is not None:
            raise fresh(self._failure)
        if submission.name in self.misses:
            raise UsageError(
                f"tensor '{submission.name}' is in flight already: wait for it before you submit it again"
            )
        if submission.goals is not None:
            handle = self._submit_hot(submission, signature, waits)
            if handle is not None:
                return handle
        with self._lock:  # between negotiation rounds the cache does not change
            if self._failure is not None:
                raise fresh(self._failure)
            known = self._requester.cached_response(submission.name)
            if known is not None:
                request, run, _ = known
                if request == submission.terms.request(submission.name):
                    submission = submission.with_goals(run.rows, self._rank, self._size)
                # Also with another signature: the cycle refuses a name that is in flight.
                handle = self._submit_hot(submission, signature, waits=False)  # no wait with the lock
                if handle is not None:
                    self._set_received_splits(handle, submission.terms.kind, run)
                    return handle
            return self._submit_miss(submission, has_name)

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

    def _submit_miss(self, submission: Submission, has_name: bool) -> Handle:
        # The root of a broadcast often calls it on another line, and a barrier has no array that could be the wrong
        # one.
        is_compared = not has_name and submission.terms.kind not in (Broadcast, Barrier)
        self._requester.submit(submission.terms.request(submission.name), call_site() if is_compared else "")
        handle = Handle(self._cycle)
        handle.inputs = submission
        self._cycle.record_submitted(submission.name, submission.terms.kind)
        self._add_miss(submission, handle)
        return handle

    def _add_miss(self, submission: Submission, handle: Handle) -> None:
        self.misses[submission.name] = handle
        self._cycle.note_miss(submission.name, submission.terms.kind, handle)
        self._cycle.want_negotiation()

    def _set_received_splits(self, handle: Handle, kind: Kind, run: Run) -> None:
        if kind is Alltoall:
            handle.received_splits = list(result_rows(kind, run.rows, self._rank, self._size))

    def _run_thread(self) -> None:
        try:
            while self._cycle.run():
                self._is_in_round = True
                self._negotiate()
                self._is_in_round = self._is_ending  # the last round follows at once
            if self._failure is None:  # the cycle has stopped before the other ranks joined the last round
                rank, host = self._names[self._rank], self._hosts[self._rank]
                raise PeerLostError(f"rank {rank} on {host} has shut down", rank, host)
        except BaseException as error:
            self._fail_engine(error)

    def _negotiate(self) -> None:
        self._cycle.begin_negotiation()
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
        self._cycle.end_negotiation()

    def _apply_stream(self, items: Sequence[StreamItem]) -> None:
        for item in items:
            # Runs that follow each other in the stream run together. Evictions and failures do not separate them.
            if not isinstance(item, Run | Evict | FailTensor):
                self._run_decided()
            with self._lock:
                for effect in self._requester.apply_item(item):
                    self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        """Perform an effect of a stream item, with the lock held."""
        match effect:
            case Execute():
                self._add_decided(effect)
            case Contribute(run):
                self._add_decided_miss(run, signature_of(run.request), [], [], True)
            case Insert(slot, request, run):
                self._cycle.insert(slot, request.name, signature_of(request), run.rows)
            case Evicted(slot):
                self._displace(self._cycle.evict(slot))
            case Failed(request, reason, left):
                if left < 0:  # otherwise Closed follows, and all pending tensors fail
                    self._cycle.record_refused(request.name)
                    self.misses.pop(request.name).fail(MismatchError(reason))
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
                adopt_values(self._cycle, effect, self._tuner)
            case Leaving():
                self._is_ending = True
                self._cycle.want_negotiation()
            case Closed(rank):
                self._stop_after(rank)

    def _displace(self, handle: Handle | None) -> None:
        """Request a pending hit again, as a miss."""
        if handle is None:
            return
        submission = submission_of(handle, self._rank, self._size)
        self._requester.request_again(submission.terms.request(submission.name))
        self._add_miss(submission, handle)

    def _add_decided(self, effect: Execute) -> None:
        """Add a tensor that is ready on all ranks to the run that comes next."""
        request, run = effect.request, effect.run
        handle = self.misses[request.name]
        submission: Submission = handle.inputs
        if submission.terms.kind in (Allgather, Alltoall):
            # A displaced hit may have targets of other sizes.
            submission = submission._replace(goals=None)
        submission = submission.with_goals(run.rows, self._rank, self._size)
        self._add_decided_miss(
            run, signature_of(submission.terms), submission.sources, submission.destinations, False
        )
        if submission.goals:
            handle.result = submission.result
        if submission.needs_finish:
            handle.finish = lambda _: submission.finish()
        self._set_received_splits(handle, request.kind, run)
        self._decided.append(request.name)

    def _add_decided_miss(
        self, run: Run, signature: _native.Signature, sources: list[Any], goals: list[Any], is_absent: bool
    ) -> None:
        self._cycle.add_miss(
            run.request.name, signature, run.rows, sources, goals, self._contributors(run), is_absent
        )
        self._has_decided = True

    def _run_decided(self) -> None:
        if not self._has_decided:
            return
        self._has_decided = False
        self._cycle.run_misses()
        with self._lock:
            handles = [self.misses.pop(name) for name in self._decided]
            self._decided.clear()
        for handle in handles:
            handle.complete()

    def _contributors(self, run: Run) -> int:
        return self._size if self._divides_by_all else self._size - len(run.absent)

    def join(self) -> int:
        """Contribute neutral elements to the operations of other ranks until all have joined; return the last rank."""
        with self._lock:
            if self._failure is not None:
                raise fresh(self._failure)
            self._requester.announce_join()
            self._cycle.join()
            handle = self._joining = Handle(self._cycle)
            self._cycle.want_negotiation()
        last: int = handle.wait()
        return last

    def _take_back_hits(self) -> None:
        for slot in self._requester.cached_names():
            self._displace(self._cycle.take_back(slot))

    def _resume_after(self, last: int) -> None:
        """Resume after all ranks have joined. Numbers of unnamed tensors restart, because ranks may differ in them."""
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
            "call join() after the last batch"
        )
        begin = f"rank {name} on {host} has shut down"
        self._failure = PeerLostError(f"{begin} and takes part in nothing more: {why}", name, host)
        self._cycle.give_up(rank, str(self._failure))
        for tensor, handle in self.misses.items():
            handle.fail(PeerLostError(f"{begin} before tensor '{tensor}' could run: {why}", name, host))
        self.misses.clear()
        self._fail_pending(self._failure)
        self._closed.set()
        self._cycle.stop()

    def _fail_pending(self, error: BaseException) -> None:
        for handle in self.misses.values():
            handle.fail(error)
        self.misses.clear()
        if self._joining is not None:
            self._joining.fail(error)

    def _fail_engine(self, error: BaseException) -> None:
        if not self._comm.has_failed() and not isinstance(error, PeerLostError):
            _log.error("the engine failed", exc_info=error)
            self._comm.abort(f"the engine failed: {error!r}")
        with self._lock:
            # Without the traceback, whose frames would keep this engine and its memory alive.
            self._failure = self._failure or fresh(error)
            self._cycle.give_up(self._rank, str(error))
            self._fail_pending(self._failure)
        self.on_failure()
        self._closed.set()

    def announce_leave(self) -> None:
        """Announce in the next negotiation round that this rank leaves."""
        with self._lock:
            if self._failure is None:
                self._requester.announce_leave()
                self._cycle.want_negotiation()

    def join_thread(self) -> None:
        """Wait for the end of the threads, after the cycle has stopped."""
        self.thread.join()
        if self._tuner is not None:
            self._tuner.close()

    def wait_until_all_know(self) -> None:
        """Wait for the last round: for a short time until it begins, then longer, because another rank may be busy."""
        until = time.monotonic() + _ROUND_PATIENCE_S
        while not self._closed.wait(_LEAVE_PATIENCE_S) and self._is_in_round and time.monotonic() < until:
            pass


class Collector:
    """A rank's place in the tree. Every rank of `comm` makes one, with the same arity."""

    def __init__(self, comm: Communicator, arity: int) -> None:
        self._comm = comm
        topology = comm.topology
        ranks_of_host: list[list[int]] = [[] for _ in range(max(topology.host_of) + 1)]
        for rank, host in enumerate(topology.host_of):
            ranks_of_host[host].append(rank)
        host, hosts = topology.host_of[comm.rank], len(ranks_of_host)
        self._is_one_host = hosts == 1
        self._leader = topology.leader
        self._local_ranks = topology.local_ranks
        self._parent = ranks_of_host[parent_of(host, arity)][0] if host > 0 else -1
        self._under = {
            ranks_of_host[child][0]: ranks_under(child, ranks_of_host, arity)
            for child in (children_of(host, hosts, arity) if comm.rank == self._leader else ())
        }

    def collect(self, outbox: Sequence[Message]) -> list[Batch]:
        """Return the messages of all ranks on rank 0, an empty list on the others. All ranks call it."""
        mine = encode_requests(outbox)
        if self._is_one_host:
            gathered = gather_bytes(self._comm, mine)
            return [self._own_batch(dict(enumerate(gathered)))] if gathered else []
        if self._comm.rank != self._leader:
            send_bytes(self._comm, mine, self._leader)
            return []
        others = [rank for rank in self._local_ranks if rank != self._comm.rank]
        outboxes = {self._comm.rank: mine}
        for rank in others:
            with sent_by(self._comm, rank):
                outboxes[rank] = receive_bytes(self._comm, rank)
        reader = BatchReader()
        batches = [self._own_batch(outboxes)]
        for child, ranks in self._under.items():
            with sent_by(self._comm, child):
                batches.append(reader.read(receive_bytes(self._comm, child), ranks))
        if self._parent < 0:
            return batches
        send_bytes(self._comm, encode_batch(merge_batches(batches)), self._parent)
        return []

    def _own_batch(self, outboxes: Mapping[int, bytes]) -> Batch:
        try:
            return batch_of_outboxes(outboxes)
        except ProtocolError:
            for rank, outbox in outboxes.items():
                with sent_by(self._comm, rank):
                    batch_of_outboxes({rank: outbox})
            raise  # each outbox alone is valid


@contextmanager
def sent_by(comm: Communicator, rank: int) -> Iterator[None]:
    """Turn a ProtocolError in the block, which reads a message of `rank`, into the loss of that rank for all ranks."""
    try:
        yield
    except ProtocolError as error:
        comm.distrust(rank, f"an invalid message: {error}")


def fresh(error: BaseException) -> BaseException:
    """Return a copy of the error without a traceback.

    A handle or an engine keeps its error and raises it in every later call. The original would keep the frames of all
    its callers alive, with their local variables.
    """
    try:
        return copy.copy(error)
    except Exception:  # an error of a library whose constructor expects other arguments than `args`
        return error.with_traceback(None)
