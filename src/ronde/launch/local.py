"""The launcher on one machine: performs what `ronde.core.worker_group` decides.

One thread, one selector, no polling. What it watches: the signals sent to us, the pipes of the workers, our own
streams while they are behind, and a pidfd of every worker (and, once a worker has exited, of every process that it
left). In one turn they are served in that order, so that a signal sent to the whole job is known before the deaths
that it causes, and what a worker said before its death.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType

from ronde.core.worker_group import (
    Event,
    Exited,
    Finish,
    Interrupt,
    NotStarted,
    SetTimer,
    SignalWorkers,
    Started,
    Timer,
    Vacated,
    WorkerGroup,
    name_ranks,
    signal_name,
)
from ronde.errors import AbortedError, PeerLostError, RemoteError, UsageError
from ronde.launch.config import Outputs
from ronde.launch.outputs import RunOutputs, WorkerOutput, substitute
from ronde.launch.plan import LaunchPlan, WorkerPlan, plan_local
from ronde.launch.report import report
from ronde.net.output import Piece, Sink, Source, Stream, claim_standard_streams, open_sinks
from ronde.net.processes import GroupLeader, Process, SignalInbox, free_port, usable_cores
from ronde.net.stores.server import StoreServer
from ronde.settings import JobKey

__all__ = ["plan_here", "run_here", "supervise"]

# How the last line of a traceback begins if the worker died of what happened to another one.
_BLAMES_PEER = re.compile(
    rb"(ronde\.)?(errors\.)?(%s)\b"
    % b"|".join(error.__name__.encode() for error in (PeerLostError, AbortedError, RemoteError))
)
_OURSELVES = Source(-1, "ronde", b"")
_SIGNALS, _OUTPUT, _SINKS, _EXITS = range(4)  # the order within a turn


def run_here(
    argv: Sequence[str],
    workers: int,
    environment: Mapping[str, str],
    more: Mapping[str, str] | None = None,
    outputs: Outputs | None = None,
) -> int:
    """Run the command (a path and its arguments) in `workers` processes and return the job's exit code.

    `environment` is the whole environment of the launcher; `more` goes before it in that of the workers. Raises
    UsageError if there can be no log directory. To be called in the main thread.
    """
    claim_standard_streams()
    key = JobKey.generate()
    with closing(StoreServer(_new_address(), key)) as store:
        plan = plan_here(argv, workers, environment, store.address, key, more)
        return supervise(plan, environment, outputs)


def plan_here(
    argv: Sequence[str],
    workers: int,
    environment: Mapping[str, str],
    store_address: str | None = None,
    job_key: JobKey | None = None,
    more: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Return the plan that fits this machine as it is now; with a made-up store and key if none are given."""
    return plan_local(
        argv,
        workers,
        environment=environment,
        cores=usable_cores(),
        store_address=store_address or _new_address(),
        job_key=job_key or JobKey.generate(),
        job_id=secrets.token_hex(8),
        master_port=free_port("127.0.0.1"),
        columns=_terminal_columns(),
        more=more,
    )


def supervise(plan: LaunchPlan, environment: Mapping[str, str], outputs: Outputs | None = None) -> int:
    """Run the plan's workers to their end, showing their output; return the job's exit code."""
    with SignalInbox() as inbox, _Supervisor(plan, environment, inbox, outputs or Outputs()) as supervisor:
        return supervisor.run()


def _terminal_columns() -> int | None:
    """Return the width of the terminal that shows progress bars; None if there is none, or it does not say."""
    return (os.get_terminal_size(2).columns or None) if os.isatty(2) else None


def _new_address() -> str:
    return f"unix:@ronde-{secrets.token_hex(8)}"


class _Supervisor:
    """The shell around one `WorkerGroup`."""

    def __init__(
        self, plan: LaunchPlan, environment: Mapping[str, str], inbox: SignalInbox, outputs: Outputs
    ) -> None:
        self._plan = plan
        self._environment = environment
        self._inbox = inbox
        self._group = WorkerGroup(worker.rank for worker in plan.workers)
        self._wanted_outputs = outputs
        self._outputs: dict[int, WorkerOutput] = {}
        self._processes: dict[int, GroupLeader] = {}
        self._streams: dict[int, set[Stream]] = {}  # by rank; those not at their end
        self._leftovers: dict[int, set[int]] = {}  # by rank: pidfds of processes that outlived their worker
        self._deadline_ns: int | None = None
        self._finish: Finish | None = None
        self._hurry = False  # a signal came after the end
        self._broken: set[Sink] = set()
        self._watched: set[int] = set()

    def __enter__(self) -> _Supervisor:
        self._out, self._err = open_sinks()
        self._sinks = {self._out, self._err}
        try:
            run_id = self._plan.workers[0].environment["TORCHELASTIC_RUN_ID"]
            self._run_outputs = RunOutputs(self._wanted_outputs, run_id, self._complain)
        except UsageError:
            for sink in self._sinks:
                sink.close()
            raise
        self._selector = selectors.PollSelector()
        self._watch(self._inbox.fileno(), _SIGNALS, self._read_signals)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, process in self._processes.items():
            # Somebody is there if he could not be killed, or if we are leaving by an exception.
            if not self._group.workers[rank].gone:
                process.signal_group(signal.SIGKILL)
            self._close_streams(rank)
        self._selector.close()
        self._run_outputs.close()
        for sink in self._sinks:
            sink.close()

    def run(self) -> int:
        """Start everybody, see them all to their end, report, and return the exit code."""
        for worker in self._plan.workers:
            self._start(worker)
            if self._finish or self._group.phase:  # one could not be started
                break
        while self._finish is None:
            self._turn()
        failed = self._outputs.get(self._finish.failed_rank) if self._finish.failed_rank is not None else None
        for line in report(self._finish, self._group.workers, failed.last_words() if failed else []):
            self._say(line)
        self._write_out()
        return self._finish.exit_code

    def _start(self, worker: WorkerPlan) -> None:
        rank = worker.rank
        output = self._run_outputs.worker(0, rank, worker.local_rank)
        argv = substitute(worker.argv, worker.local_rank)
        environment = {**self._environment, **worker.environment, **output.environment}
        try:
            with output.files() as (stdout, stderr):
                process = Process(argv, environment, stdout=stdout, stderr=stderr)
        except OSError as error:
            return self._tell(NotStarted(rank, error.strerror or str(error)))
        self._processes[rank], self._outputs[rank] = process, output
        self._streams[rank] = output.streams(process, self._out, self._err)
        self._watch(process.pidfd, _EXITS, partial(self._worker_exited, rank))
        return self._tell(Started(rank, process.pid))

    # One turn of the loop: who is watched, and who is served.

    def _turn(self) -> None:
        self._balance()
        ready = [key.data for key, _ in self._selector.select(self._timeout_s())]
        for _, serve in sorted(ready, key=lambda order_and_serve: order_and_serve[0]):
            serve()
        for sink in {sink for sink in self._sinks if sink.problem} - self._broken:
            self._broken.add(sink)
            self._tell(Interrupt(signal.SIGPIPE))
        if self._deadline_ns is not None and time.monotonic_ns() >= self._deadline_ns:
            self._tell(Timer())

    def _timeout_s(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return max(0, self._deadline_ns - time.monotonic_ns()) / 1e9

    def _balance(self) -> None:
        """Read from the workers as long as our own streams take it, and write to these when they are behind."""
        for sink in self._sinks:
            self._watch(sink.fileno(), _SINKS, sink.flush, wanted=sink.waiting, events=selectors.EVENT_WRITE)
        for rank, streams in self._streams.items():
            for stream in streams:
                pump = partial(self._pump, rank, stream)
                self._watch(stream.fileno(), _OUTPUT, pump, wanted=not stream.held_up)

    def _watch(
        self,
        fd: int,
        order: int,
        serve: Callable[[], None],
        *,
        wanted: bool = True,
        events: int = selectors.EVENT_READ,
    ) -> None:
        if wanted and fd not in self._watched:
            self._selector.register(fd, events, (order, serve))
            self._watched.add(fd)
        elif not wanted:
            self._unwatch(fd)

    def _unwatch(self, fd: int) -> None:
        if fd in self._watched:
            self._selector.unregister(fd)
            self._watched.remove(fd)

    def _read_signals(self) -> None:
        for signum in self._inbox.read():
            self._hurry = self._finish is not None
            self._tell(Interrupt(signum))

    def _pump(self, rank: int, stream: Stream) -> None:
        if stream.pump() is None:
            self._close_stream(rank, stream)

    def _close_stream(self, rank: int, stream: Stream) -> None:
        self._unwatch(stream.fileno())
        self._streams[rank].remove(stream)
        stream.close()

    def _close_streams(self, rank: int) -> None:
        for stream in list(self._streams[rank]):
            self._close_stream(rank, stream)

    def _worker_exited(self, rank: int) -> None:
        process = self._processes[rank]
        for stream in self._streams[rank]:
            stream.drain()
        self._unwatch(process.pidfd)
        returncode = process.reap()
        leftovers = self._watch_leftovers(rank)
        blames_peer = any(_BLAMES_PEER.match(line) for line in self._outputs[rank].last_lines())
        self._tell(Exited(rank, returncode, blames_peer, leftovers))

    def _watch_leftovers(self, rank: int) -> bool:
        """Watch what is left of the group of a worker that has exited; False if that is nothing."""
        pidfds = self._processes[rank].open_group()
        for pidfd in pidfds:
            self._watch(pidfd, _EXITS, partial(self._leftover_exited, rank, pidfd))
        self._leftovers[rank] = set(pidfds)
        if not pidfds:
            self._close_streams(rank)  # a daemon may still hold the other end
        return bool(pidfds)

    def _leftover_exited(self, rank: int, pidfd: int) -> None:
        self._unwatch(pidfd)
        os.close(pidfd)
        self._leftovers[rank].remove(pidfd)
        if not self._leftovers[rank]:
            for stream in self._streams[rank]:
                stream.drain()
            if not self._watch_leftovers(rank):  # they may have started others
                self._tell(Vacated(rank))

    # What the machine wants.

    def _tell(self, event: Event) -> None:
        for effect in self._group.step(time.monotonic_ns(), event):
            match effect:
                case SignalWorkers(ranks, signum, reason):
                    self._say(f"ronde: {reason}: {signal_name(signum)} to {name_ranks(ranks)}".encode())
                    for rank in ranks:
                        self._processes[rank].signal_group(signum)
                case SetTimer(at_ns):
                    self._deadline_ns = at_ns
                case Finish():
                    self._finish, self._deadline_ns = effect, None

    def _complain(self, text: str) -> None:
        self._say(f"ronde: {text}".encode())

    def _say(self, line: bytes) -> None:
        self._err.show(_OURSELVES, [Piece(line, b"\n")])

    def _write_out(self) -> None:
        """Wait until our streams have taken everything, or somebody tells us to end."""
        while any(sink.waiting for sink in self._sinks) and not self._hurry:
            self._turn()
