"""One run of the workers of this node: performs what `ronde.core.worker_group` decides.

It lives in the launcher's loop and watches the pipes of the workers, and a pidfd of every worker (and, once a worker
has exited, of every process that it left). What comes of it is told to whoever started it: THE failure, as soon as it
is known, and the end, when no process is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from ronde.core.worker_group import (
    Event,
    Exited,
    Finish,
    GroupTimer,
    InterruptGroup,
    NotStarted,
    Policy,
    SetGroupTimer,
    SignalWorkers,
    Started,
    StopGroup,
    Vacated,
    WorkerGroup,
    WorkerRaised,
    name_ranks,
    signal_name,
)
from ronde.launch.agent.outputs import WorkerOutput
from ronde.launch.loop import Loop, Order
from ronde.launch.plan import LaunchPlan, WorkerPlan
from ronde.launch.screen import Screen
from ronde.process.error_file import is_blame
from ronde.process.output import OutputStream
from ronde.process.process_groups import GroupLeader

__all__ = ["Supervisor"]

MOST_OF_ERROR = 200  # characters of an exception, in a sentence
PROMPT_NS = 10**8  # what stands still for so long in the middle of a line may be waiting for an answer


class Supervisor:
    """The shell around one `WorkerGroup`.

    `failing` hears which worker is THE failure, as soon as that is known, and `ended` how it ended, when no process is
    left; both in the loop's thread. After that only `close` may be called, and what the workers were is still there.
    `heed` is called between two starts, which may take long: it passes on the signals that we got meanwhile. `start`
    raises InterruptedError where there are any.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        start: Callable[[WorkerPlan], tuple[GroupLeader, WorkerOutput]],
        policy: Policy,
        loop: Loop,
        screen: Screen,
        failing: Callable[[int], None],
        ended: Callable[[Finish], None],
        heed: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._start_process = start
        self._loop = loop
        self._screen = screen
        self._failing = failing
        self._ended = ended
        self._heed = heed
        self._cause: int | None = None  # as far as it has been told
        self.group = WorkerGroup((worker.rank for worker in plan.workers), policy)
        self._processes: dict[int, GroupLeader] = {}
        self._outputs: dict[int, WorkerOutput] = {}
        self._streams: dict[int, set[OutputStream]] = {}  # by rank; those not at their end
        self._leftovers: dict[int, set[int]] = {}  # by rank: pidfds of processes that outlived their worker
        self._finished = False
        self._is_interactive = os.isatty(0)  # then local rank 0 reads what is typed

    def start(self) -> None:
        """Start everybody, until one cannot be started or a signal comes."""
        waiting = deque(self._plan.workers)
        while waiting and not (self._finished or self.group.phase):
            try:
                self._start(waiting[0])
                waiting.popleft()
            except InterruptedError:
                pass  # by a signal: once it is heeded nobody is started any more
            self._heed()

    def interrupt(self, signum: int) -> None:
        """Pass on a signal that we got."""
        self._tell(InterruptGroup(signum))

    def stop(self, reason: str, at_once: bool = False) -> None:
        """End the workers; `at_once`: by SIGKILL."""
        self._tell(StopGroup(reason, at_once))

    def raised(self, rank: int) -> None:
        """Hear that a worker has raised an exception that nobody catches, and is going to end."""
        if rank not in self._outputs:
            return
        for stream in self._streams[rank]:
            stream.drain()  # its traceback
        error = self._outputs[rank].error()
        what = error.message.partition("\n")[0] if error else "an exception"
        what = what if len(what) <= MOST_OF_ERROR else what[: MOST_OF_ERROR - 3] + "..."
        self._tell(WorkerRaised(rank, what, bool(error and error.blames_peer), error.time_ns if error else 0))

    def local_rank(self, rank: int) -> int:
        """Return the place of a worker among those of this node."""
        return rank - self._plan.workers[0].rank

    def has(self, rank: int, pid: int) -> bool:
        """Return whether this is one of the workers."""
        return rank in self.group.workers and self.group.workers[rank].pid == pid

    def last_words(self, rank: int | None) -> list[bytes]:
        """Return what a worker that failed has said last, with its traceback at the end; nothing without a rank."""
        output = self._outputs.get(rank) if rank is not None else None
        return output.last_words() if output else []

    def error_file(self, rank: int) -> str:
        """Return where a worker writes the exception that ends it; nothing if that cannot be read."""
        output = self._outputs.get(rank)
        return output.error_file if output and not output.is_silent else ""

    def pids(self) -> dict[int, int]:
        """Return the process of each rank whose own process runs."""
        return {rank: worker.pid for rank, worker in self.group.workers.items() if worker.returncode is None}

    def balance(self) -> None:
        """Before each turn: read from the workers as long as our own streams take it."""
        for rank, streams in self._streams.items():
            for stream in streams:
                pump = partial(self._pump, rank, stream)
                self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Let go of everything; who is still there, because he could not be killed or we leave early, is killed."""
        self._loop.set_timer(self, None, self._ring)
        for rank, process in self._processes.items():
            worker = self.group.workers[rank]
            if not worker.gone:
                process.signal_group(signal.SIGKILL)
            if worker.returncode is None:
                self._loop.unwatch(process.pidfd)
            self._close_streams(rank)
            for pidfd in self._leftovers.get(rank, ()):
                self._loop.unwatch(pidfd)
                os.close(pidfd)

    def _start(self, worker: WorkerPlan) -> None:
        rank = worker.rank
        try:
            process, output = self._start_process(worker)
        except InterruptedError:
            raise
        except OSError as error:
            from ronde.process.shortages import shortage  # only now: it costs every start

            return self._tell(NotStarted(rank, shortage(error) or error.strerror or str(error)))
        self._processes[rank], self._outputs[rank], self._streams[rank] = process, output, set()
        self._loop.watch(process.pidfd, Order.EXITS, partial(self._worker_exited, rank))
        self._tell(Started(rank, process.pid))
        # Last, so that `close` ends the worker if there is no room for this.
        self._streams[rank] = output.streams(process, self._screen.out, self._screen.err)
        return None

    def _pump(self, rank: int, stream: OutputStream) -> None:
        if stream.pump() is None:
            self._close_stream(rank, stream)
        elif self._is_interactive and self.local_rank(rank) == 0:
            at_ns = time.monotonic_ns() + PROMPT_NS if stream.may_be_prompt else None
            self._loop.set_timer(stream, at_ns, stream.show_prompt)

    def _close_stream(self, rank: int, stream: OutputStream) -> None:
        self._loop.set_timer(stream, None, stream.show_prompt)
        self._loop.unwatch(stream.fileno())
        self._streams[rank].remove(stream)
        stream.close()

    def _close_streams(self, rank: int) -> None:
        for stream in list(self._streams[rank]):
            self._close_stream(rank, stream)

    def _worker_exited(self, rank: int) -> None:
        process = self._processes[rank]
        for stream in self._streams[rank]:
            stream.drain()
        self._loop.unwatch(process.pidfd)
        returncode = process.reap()
        leftovers = self._watch_leftovers(rank)
        error = self._outputs[rank].error() if returncode else None
        blames_peer = error.blames_peer if error else any(map(is_blame, self._outputs[rank].last_lines()))
        self._tell(Exited(rank, returncode, blames_peer, leftovers, error.time_ns if error else 0))

    def _watch_leftovers(self, rank: int) -> bool:
        """Watch what is left of the group of a worker that has exited; False if that is nothing."""
        pidfds = self._processes[rank].open_group()
        for pidfd in pidfds:
            self._loop.watch(pidfd, Order.EXITS, partial(self._leftover_exited, rank, pidfd))
        self._leftovers[rank] = set(pidfds)
        if not pidfds:
            self._close_streams(rank)  # a daemon may still hold the other end
        return bool(pidfds)

    def _leftover_exited(self, rank: int, pidfd: int) -> None:
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        self._leftovers[rank].remove(pidfd)
        if not self._leftovers[rank]:
            for stream in self._streams[rank]:
                stream.drain()
            if not self._watch_leftovers(rank):  # they may have started others
                self._tell(Vacated(rank))

    # What the machine wants.

    def _ring(self) -> None:
        self._tell(GroupTimer())

    def _tell(self, event: Event) -> None:
        effects = self.group.step(time.monotonic_ns(), event)
        if self.group.cause != self._cause:
            self._cause = self.group.cause
            if self._cause is not None:
                self._failing(self._cause)
        for effect in effects:
            match effect:
                case SignalWorkers(ranks, signum, reason):
                    self._screen.say(
                        f"ronde: {reason}: {signal_name(signum)} to {name_ranks(ranks)}".encode()
                    )
                    for rank in ranks:
                        self._processes[rank].signal_group(signum)
                        self._processes[rank].signal_group(signal.SIGCONT)  # who is stopped would not heed it
                case SetGroupTimer(at_ns):
                    self._loop.set_timer(self, at_ns, self._ring)
                case Finish():
                    self._finished = True
                    self._loop.set_timer(self, None, self._ring)
                    self._ended(effect)
