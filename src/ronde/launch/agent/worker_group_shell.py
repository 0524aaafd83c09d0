"""One run of the workers of this node: performs what `ronde.launch.agent.worker_group` decides.

In the launcher's loop it watches the pipes of the workers, and a pidfd of every worker and of every process that an
exited worker left behind. It reports the cause of a failure as soon as that is known, and the end when no process is
left. It also reports workers that a signal has stopped (SIGSTOP, Ctrl-Z in a debugger): they live, so the job waits for
them. The kernel does not announce them, so a short file of /proc is read for each worker now and then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from ronde.launch.agent.outputs import WorkerOutput
from ronde.launch.agent.worker_group import (
    Absent,
    Event,
    Exited,
    GroupEnd,
    GroupTimer,
    InterruptGroup,
    NotStarted,
    Policy,
    SetGroupTimer,
    SignalWorkers,
    Started,
    StopGroup,
    Vacated,
    Worker,
    WorkerGroup,
    WorkerJoined,
    WorkerJoins,
    WorkerLeft,
    WorkerMissed,
    WorkerRaised,
    WorkerReplaced,
    name_ranks,
    signal_name,
)
from ronde.launch.launch_plan import LaunchPlan
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import OutputStream, Screen
from ronde.process.exceptions import is_blame
from ronde.process.process_groups import GroupLeader
from ronde.process.uncaught import Announcement, Announcements

__all__ = [
    "GroupListener",
    "WorkerGroupShell",
]

LEAST_NS = 10**9  # the shortest interval between two checks whether workers are stopped
MOST_OF_ERROR = 200  # characters of an exception, in a sentence
PROMPT_NS = 10**8  # after this pause in the middle of a line, the line may be a question


class GroupListener(Protocol):
    """What learns of one run of the workers, in the loop's thread."""

    def note_cause(self, rank: int) -> None:
        """Note that the failure of this worker is the cause, as soon as that is known."""

    def note_awaited_exit(self, is_awaited: bool) -> None:
        """Note whether a worker has left the other ranks and still runs, when that changes."""

    def note_absent(self, absent: Absent | None) -> None:
        """Note the worker that other nodes would miss first, when that changes."""

    def note_end(self, end: GroupEnd) -> None:
        """Note the end, when no process is left."""


class WorkerGroupShell:
    """The shell around one `WorkerGroup`.

    `announcements`: those of the workers. After the end, only `note_missed` and `close` may be called, and the workers'
    data stay.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        policy: Policy,
        loop: Loop,
        screen: Screen,
        announcements: Announcements,
        monitor_interval_ns: int,
        listener: GroupListener,
    ) -> None:
        self._plan = plan
        self._loop = loop
        self._screen = screen
        self._announcements = announcements
        self._listener = listener
        self._cause: int | None = None  # these three: what the listener knows
        self._awaits_exit = False
        self._absent: Absent | None = None
        self._group = WorkerGroup((worker.rank for worker in plan.workers), policy)
        self._processes: dict[int, GroupLeader] = {}
        self._outputs: dict[int, WorkerOutput] = {}
        self._streams: dict[int, set[OutputStream]] = {}  # by rank; open ones
        self._leftovers: dict[int, set[int]] = {}  # by rank: pidfds of processes that outlived their worker
        self._finished = False
        self._is_interactive = os.isatty(0)  # then the first worker reads what is typed
        self._stopped = _StoppedWorkers(loop, monitor_interval_ns, screen, self._pids)

    @property
    def workers(self) -> Mapping[int, Worker]:
        """The workers that have started, or could not start, by rank."""
        return self._group.workers

    @property
    def takes_workers(self) -> bool:
        """Whether further workers may start."""
        return not (self._finished or self._group.phase)

    def add_worker(self, rank: int, process: GroupLeader, output: WorkerOutput) -> None:
        """Take over a worker that has started."""
        self._processes[rank], self._outputs[rank], self._streams[rank] = process, output, set()
        self._loop.watch(process.pidfd, Order.EXITS, partial(self._worker_exited, rank))
        self._step_group(Started(rank, process.pid))
        # Last, so that `close` ends the worker if this fails.
        self._streams[rank] = output.streams(process, self._screen.out, self._screen.err)

    def note_unstarted(self, rank: int, problem: str) -> None:
        """Note that a worker cannot start. No further ones may start then."""
        self._step_group(NotStarted(rank, problem))

    def interrupt_workers(self, signum: int) -> None:
        """Pass a signal on to the workers."""
        self._step_group(InterruptGroup(signum))

    def stop_workers(self, reason: str, at_once: bool = False) -> None:
        """End the workers; `at_once`: by SIGKILL."""
        self._step_group(StopGroup(reason, at_once))

    def note_announcement(self, announcement: Announcement) -> None:
        """Note that a worker has an uncaught exception, has left the other ranks, or joins them."""
        rank = announcement.rank
        if rank not in self._outputs:
            return
        match announcement.what:
            case "raised":
                self._note_exception(rank)
            case "left":
                self._step_group(WorkerLeft(rank))
            case "joins" if str(announcement.size) == self._plan.workers[0].environment["WORLD_SIZE"]:
                # Not a world that the program has made up.
                self._step_group(WorkerJoins(rank, announcement.epoch))
            case "joined":
                self._step_group(WorkerJoined(rank))

    def note_missed(self, rank: int, by: int) -> None:
        """Note that a rank of another node waits in `ronde.init` for this worker, which has ended."""
        self._step_group(WorkerMissed(rank, by))

    def _note_exception(self, rank: int) -> None:
        for stream in self._streams[rank]:
            stream.drain()  # its traceback
        error = self._outputs[rank].error()
        what = error.message.partition("\n")[0] if error else "an exception"
        what = what if len(what) <= MOST_OF_ERROR else what[: MOST_OF_ERROR - 3] + "..."
        self._step_group(
            WorkerRaised(rank, what, bool(error and error.blames_peer), error.time_ns if error else 0)
        )
        if error and error.blames_peer:
            self._find_replaced()

    def _find_replaced(self) -> None:
        """Find workers that have joined the others and now run another program: they are lost to these."""
        for rank, worker in self._group.workers.items():
            if worker.returncode is None and worker.epochs and not worker.has_left:
                if not self._announcements.is_held_by(worker.pid) and (program := _program_of(worker.pid)):
                    self._step_group(WorkerReplaced(rank, program))

    def local_rank(self, rank: int) -> int:
        """Return a worker's local rank."""
        return self._plan.workers[rank - self._plan.workers[0].rank].local_rank

    def has_worker(self, rank: int, pid: int) -> bool:
        """Return whether this is one of the workers."""
        return rank in self._group.workers and self._group.workers[rank].pid == pid

    def last_output(self, rank: int | None) -> list[bytes]:
        """Return a failed worker's last output, the traceback at the end; empty without a rank."""
        output = self._outputs.get(rank) if rank is not None else None
        return output.last_output() if output else []

    def left_tracebacks(self) -> dict[int, str]:
        """Return the tracebacks that failed workers have left to the report, by rank."""
        found = {rank: output.left_traceback() for rank, output in sorted(self._outputs.items())}
        return {rank: text for rank, text in found.items() if text}

    def error_file(self, rank: int) -> str:
        """Return the path of a worker's error file; empty if its disk does not answer."""
        output = self._outputs.get(rank)
        return output.error_file if output and not output.is_silent else ""

    def _pids(self) -> dict[int, int]:
        """Return the process id of each rank whose process runs."""
        return {rank: worker.pid for rank, worker in self._group.workers.items() if worker.returncode is None}

    def balance(self) -> None:
        """Read from the workers only while the launcher's streams accept output. Call this before each turn."""
        for rank, streams in self._streams.items():
            for stream in streams:
                pump = partial(self._pump, rank, stream)
                self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Kill the workers that are left, and close everything."""
        self._loop.set_timer(self, None, self._send_timer)
        self._stopped.end()
        for rank, process in self._processes.items():
            worker = self._group.workers[rank]
            if not worker.gone:
                process.signal_group(signal.SIGKILL)
            if worker.returncode is None:
                self._loop.unwatch(process.pidfd)
            self._close_streams(rank)
            for pidfd in self._leftovers.get(rank, ()):
                self._loop.unwatch(pidfd)
                os.close(pidfd)

    def _pump(self, rank: int, stream: OutputStream) -> None:
        if stream.pump() is None:
            self._close_stream(rank, stream)
        elif self._is_interactive and rank == self._plan.workers[0].rank:
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
        self._step_group(Exited(rank, returncode, blames_peer, leftovers, error.time_ns if error else 0))
        if blames_peer:
            self._find_replaced()

    def _watch_leftovers(self, rank: int) -> bool:
        """Watch the processes that an exited worker left behind. Return whether there are any."""
        pidfds = self._processes[rank].open_group()
        for pidfd in pidfds:
            self._loop.watch(pidfd, Order.EXITS, partial(self._leftover_exited, rank, pidfd))
        self._leftovers[rank] = set(pidfds)
        if not pidfds:
            self._close_streams(rank)  # a daemon may still hold the other end open
        return bool(pidfds)

    def _leftover_exited(self, rank: int, pidfd: int) -> None:
        self._loop.unwatch(pidfd)
        os.close(pidfd)
        self._leftovers[rank].remove(pidfd)
        if not self._leftovers[rank]:
            for stream in self._streams[rank]:
                stream.drain()
            if not self._watch_leftovers(rank):  # they may have started others
                self._step_group(Vacated(rank))

    # Effects

    def _send_timer(self) -> None:
        self._step_group(GroupTimer())

    def _step_group(self, event: Event) -> None:
        effects = self._group.step(time.monotonic_ns(), event)
        if self._group.cause != self._cause:
            self._cause = self._group.cause
            if self._cause is not None:
                self._listener.note_cause(self._cause)
        if self._group.awaits_exit != self._awaits_exit:
            self._awaits_exit = self._group.awaits_exit
            self._listener.note_awaited_exit(self._awaits_exit)
        if isinstance(event, Exited | Vacated) and self._group.absent != self._absent:
            self._absent = self._group.absent
            self._listener.note_absent(self._absent)
        for effect in effects:
            match effect:
                case SignalWorkers(ranks, signum, reason):
                    self._screen.tell(f"{reason}: {signal_name(signum)} to {name_ranks(ranks)}")
                    for rank in ranks:
                        self._processes[rank].signal_group(signum)
                        # A stopped process would not receive the signal.
                        self._processes[rank].signal_group(signal.SIGCONT)
                case SetGroupTimer(at_ns):
                    self._loop.set_timer(self, at_ns, self._send_timer)
                case GroupEnd():
                    self._finished = True
                    self._stopped.end()
                    self._loop.set_timer(self, None, self._send_timer)
                    self._listener.note_end(effect)


def _program_of(pid: int) -> str:
    """Return the words that started the program of a process; "" if the process is ending."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
    except OSError:
        return ""
    text = " ".join(words).strip()
    return text if len(text) <= MOST_OF_ERROR else text[: MOST_OF_ERROR - 3] + "..."


class _StoppedWorkers:
    """Reports once when a worker is stopped, and when it continues. `pids` returns those that run, by rank."""

    def __init__(
        self, loop: Loop, interval_ns: int, screen: Screen, pids: Callable[[], Mapping[int, int]]
    ) -> None:
        self._loop = loop
        self._interval_ns = max(LEAST_NS, interval_ns)
        self._screen = screen
        self._pids = pids
        self._stopped: set[int] = set()
        self._set_timer()

    def end(self) -> None:
        """End the reports. A second call does nothing."""
        self._loop.set_timer(self, None, self._check_processes)

    def _set_timer(self) -> None:
        self._loop.set_timer(self, time.monotonic_ns() + self._interval_ns, self._check_processes)

    def _check_processes(self) -> None:
        for rank, pid in self._pids().items():
            stopped = _state(pid) == b"T"
            if stopped and rank not in self._stopped:
                now = time.strftime("%H:%M:%S")
                self._screen.tell(
                    f"rank {rank} (pid {pid}) is stopped by a signal (noticed at {now}), and the job waits for it: "
                    f"kill -CONT {pid} continues it"
                )
                self._stopped.add(rank)
            elif not stopped and rank in self._stopped:
                self._screen.tell(f"rank {rank} (pid {pid}) continues")
                self._stopped.discard(rank)
        self._set_timer()


def _state(pid: int) -> bytes:
    """Return the letter of the state of a process, empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""
