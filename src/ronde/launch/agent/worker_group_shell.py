"""One run of the workers of this node: performs what `ronde.launch.agent.worker_group` decides.

In the launcher's loop it watches the pipes of the workers, and a pidfd of every worker and of every process that an
exited worker left behind. It reports the cause of a failure as soon as that is known, and the end when no process is
left. It also reports workers that a signal has stopped (SIGSTOP, Ctrl-Z in a debugger): they live, so the job waits for
them. The kernel does not announce them, so a short file of /proc is read for each worker now and then.

Workers that continue have a channel (`process/membership_channel`). `release_survivors` gives their processes to the
next run. Until a worker has read its new place, its announcements carry its rank of an earlier round.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from ronde.launch.agent.living_worker import LivingWorker
from ronde.launch.agent.worker import Worker, name_ranks, signal_name
from ronde.launch.agent.worker_group import (
    Absent,
    Event,
    Exited,
    GroupEnd,
    GroupSettled,
    GroupTimer,
    InterruptGroup,
    NoRoundFollows,
    NotStarted,
    Policy,
    SetGroupTimer,
    SignalWorkers,
    Started,
    StopGroup,
    Vacated,
    WorkerAwaits,
    WorkerCompleted,
    WorkerContinues,
    WorkerGroup,
    WorkerJoined,
    WorkerJoins,
    WorkerLeft,
    WorkerMissed,
    WorkerRaised,
    WorkerReplaced,
)
from ronde.launch.launch_plan import LaunchPlan
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import OutputStream, Screen
from ronde.process.exceptions import ErrorReport, is_blame
from ronde.process.membership_channel import (
    Awaits,
    ChangeWanted,
    Completed,
    Continues,
    RoundLost,
    TrainingCompleted,
)
from ronde.process.uncaught import Announcement, Announcements

__all__ = [
    "GroupListener",
    "WorkerGroupShell",
    "unwatch_worker",
]

LEAST_NS = 10**9  # the shortest interval between two checks whether workers are stopped
MOST_OF_ERROR = 200  # characters of an exception, in a sentence
PROMPT_NS = 10**8  # after this pause in the middle of a line, the line may be a question


class GroupListener(Protocol):
    """What learns of one run of the workers, in the loop's thread."""

    def note_cause(self, rank: int) -> None:
        """Note that the failure of this worker is the cause, as soon as that is known."""

    def note_continuing(self, count: int) -> None:
        """Note how many workers would outlive the end of the round, when that changes."""

    def note_world_left(self) -> None:
        """Note that a worker has left the world of a round, and waits for its place in a later one."""

    def note_completed(self, training: int) -> None:
        """Note that all ranks have finished the training of this number, as a worker of this node knows."""

    def note_settled(self) -> None:
        """Note that no process is left but those of workers that continue, as `stop_workers` with `keeps` has asked."""

    def note_awaited_exit(self, is_awaited: bool) -> None:
        """Note whether a worker has left the other ranks and still runs, when that changes."""

    def note_absent(self, absent: Absent | None) -> None:
        """Note the worker that other nodes would miss first, when that changes."""

    def note_end(self, end: GroupEnd) -> None:
        """Note the end, when no process is left."""


class WorkerGroupShell:
    """The shell around one `WorkerGroup`.

    `number`: that of the round. `announcements`: those of the workers. After the end, only `note_missed` and `close`
    may be called, and the workers' data stay.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        number: int,
        policy: Policy,
        loop: Loop,
        screen: Screen,
        announcements: Announcements,
        monitor_interval_ns: int,
        listener: GroupListener,
    ) -> None:
        self._plan = plan
        self._number = number
        self._loop = loop
        self._screen = screen
        self._announcements = announcements
        self._listener = listener
        self._cause: int | None = None  # these four: what the listener knows
        self._continuing = 0
        self._awaits_exit = False
        self._absent: Absent | None = None
        self._group = WorkerGroup((worker.rank for worker in plan.workers), policy)
        self._living: dict[int, LivingWorker] = {}  # by rank; also of those that have ended
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

    def add_worker(self, rank: int, worker: LivingWorker) -> None:
        """Take over a worker that has started with this rank."""
        worker.placed_ns, worker.world = worker.since_ns, self._number
        self._take_over(rank, worker, None)
        # Last, so that `close` ends the worker if this fails.
        worker.streams = worker.output.streams(worker.process, self._screen.out, self._screen.err)

    def place_worker(self, rank: int, worker: LivingWorker, reason: str, lost: tuple[str, ...]) -> None:
        """Take over a worker of an earlier run, or one without a place, and tell it the place in this round."""
        worker.placed_ns = time.monotonic_ns()
        if not worker.places:
            worker.world = self._number
        plan = self._plan.workers[rank - self._plan.workers[0].rank]
        worker.give_place(plan, self._number, reason, lost)
        self._take_over(rank, worker, worker.since_ns)

    def _take_over(self, rank: int, worker: LivingWorker, since_ns: int | None) -> None:
        self._living[rank] = worker
        if not worker.places:
            worker.home = rank - self._plan.workers[0].rank
        worker.places[self._number] = rank
        self._loop.watch(worker.process.pidfd, Order.EXITS, partial(self._worker_exited, rank))
        if worker.channel is not None:
            self._loop.watch(worker.channel.fileno(), Order.RAISED, partial(self._read_channel, rank))
        self._step_group(Started(rank, worker.process.pid, since_ns, worker.continues))
        if worker.has_completed:
            self._step_group(WorkerCompleted(rank))

    def release_survivors(self) -> list[LivingWorker]:
        """Let go of the workers that continue, in the order of their ranks, for the next run."""
        released = []
        for rank in self._group.survivors:
            worker = self._living.pop(rank)
            unwatch_worker(self._loop, worker)
            released.append(worker)
        return released

    @property
    def survivors(self) -> int:
        """How many workers would outlive the end of the round."""
        return len(self._group.survivors)

    @property
    def takes_newcomers(self) -> bool:
        """Whether new processes can take part in the training of the workers that would outlive the round."""
        return all(self._living[rank].takes_newcomers for rank in self._group.survivors)

    @property
    def oldest_world(self) -> int:
        """The number of the earliest round whose world a worker may still be in."""
        worlds = (self._living[rank].world for rank in self._pids() if rank in self._living)
        return min(worlds, default=self._number)

    @property
    def has_left_world(self) -> bool:
        """Whether all workers that run have left the world of this round."""
        running = list(self._pids())
        waiting = [self._living[rank] for rank in running if rank in self._living]
        return len(waiting) == len(running) > 0 and all(
            worker.world > self._number and not worker.has_completed for worker in waiting
        )

    def notify_workers(self, message: RoundLost | ChangeWanted) -> None:
        """Send the message to all workers that continue."""
        for rank in self._group.survivors:
            self._living[rank].send_message(message)

    def end_continuing(self, reason: str) -> None:
        """End the workers if some of them continue, because no round follows."""
        self._step_group(NoRoundFollows(reason))

    def _read_channel(self, rank: int) -> None:
        worker = self._living[rank]
        for message in worker.read_messages():
            match message:
                case Continues():
                    worker.note_continues()
                    self._step_group(WorkerContinues(rank))
                case Completed(training):
                    worker.has_completed = True
                    self._step_group(WorkerCompleted(rank))
                    self.notify_of_completion(training)
                    self._listener.note_completed(training)
                case Awaits(after):
                    worker.has_joined = worker.has_joined or after >= 0
                    if after >= self._number:
                        self._step_group(WorkerAwaits(rank))
                    worker.world = self._number if after < self._number else after + 1
                    self._listener.note_world_left()
        if worker.channel is not None and worker.channel.has_ended:
            self._loop.unwatch(worker.channel.fileno())

    @property
    def awaited_training(self) -> int:
        """The number of the training whose world all workers that run have left without knowing its end; 0: none."""
        waiting = [self._living[rank] for rank in self._pids() if rank in self._living]
        numbers = {worker.trainings for worker in waiting if not worker.has_completed}
        return numbers.pop() if len(numbers) == 1 and self.has_left_world else 0

    def notify_of_completion(self, training: int) -> None:
        """Let workers that have lost the others in the last barrier of the training know that they may end."""
        for rank in self._group.survivors:
            if not self._living[rank].has_completed:
                self._living[rank].send_message(TrainingCompleted(training))

    def note_unstarted(self, rank: int, problem: str) -> None:
        """Note that a worker cannot start. No further ones may start then."""
        self._step_group(NotStarted(rank, problem))

    def interrupt_workers(self, signum: int) -> None:
        """Pass a signal on to the workers."""
        self._step_group(InterruptGroup(signum))

    def stop_workers(self, reason: str, at_once: bool = False, keeps: bool = False) -> None:
        """End the workers; `at_once`: by SIGKILL; `keeps`: only those that do not continue."""
        self._step_group(StopGroup(reason, at_once, keeps))

    def note_announcement(self, announcement: Announcement) -> None:
        """Note that a worker has an uncaught exception, has left the other ranks, or joins them."""
        is_earlier = announcement.round not in (None, self._number)
        rank = self._rank_now(announcement.rank, announcement.round) if is_earlier else announcement.rank
        if rank not in self._living:
            return
        if announcement.what == "joined":
            self._living[rank].has_joined = True
        match announcement.what:
            case "raised":
                if self._living[rank].channel is not None:
                    self._read_channel(rank)  # it may have said before that all have finished
                self._note_exception(rank)
            case "left":
                self._step_group(WorkerLeft(rank))
            case _ if is_earlier:
                pass
            case "joins" if str(announcement.size) == self._plan.workers[0].environment["WORLD_SIZE"]:
                # Not a world that the program has made up.
                self._step_group(WorkerJoins(rank, announcement.epoch))
            case "joined":
                self._step_group(WorkerJoined(rank))

    def _rank_now(self, rank: int, number: int | None) -> int:
        """Return the present rank of the worker that had this rank in an earlier round; -1 if it is not here."""
        found = (now for now, worker in self._living.items() if worker.places.get(number or 0) == rank)
        return next(found, -1)

    def note_missed(self, rank: int, by: int) -> None:
        """Note that a rank of another node waits in `ronde.init` for this worker, which has ended."""
        self._step_group(WorkerMissed(rank, by))

    def _note_exception(self, rank: int) -> None:
        for stream in self._living[rank].streams:
            stream.drain()  # its traceback
        error = self._living[rank].output.error()
        what = _headline(error) or "an exception"
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

    def lifetime_ns(self, rank: int) -> int:
        """Return how long a worker that has ended had its place."""
        worker, living = self._group.workers[rank], self._living.get(rank)
        return worker.ended_ns - living.placed_ns if living else 0

    def took_part(self, rank: int) -> bool:
        """Return whether a worker was in the world of a round, as one that continues."""
        living = self._living.get(rank)
        return living is not None and living.continues and living.has_joined

    def last_output(self, rank: int | None) -> list[bytes]:
        """Return a failed worker's last output, the traceback at the end; empty without a rank."""
        living = self._living.get(rank) if rank is not None else None
        return living.output.last_output() if living else []

    def left_tracebacks(self) -> dict[int, str]:
        """Return the tracebacks that failed workers have left to the report, by rank."""
        found = {rank: worker.output.left_traceback() for rank, worker in sorted(self._living.items())}
        return {rank: text for rank, text in found.items() if text}

    def error_file(self, rank: int) -> str:
        """Return the path of a worker's error file; empty if its disk does not answer."""
        living = self._living.get(rank)
        return living.output.error_file if living and not living.output.is_silent else ""

    def _pids(self) -> dict[int, int]:
        """Return the process id of each rank whose process runs."""
        return {rank: worker.pid for rank, worker in self._group.workers.items() if worker.returncode is None}

    def balance(self) -> None:
        """Read from the workers only while the launcher's streams accept output. Call this before each turn."""
        for rank, worker in self._living.items():
            for stream in worker.streams:
                pump = partial(self._pump, rank, stream)
                self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Kill the workers that are left, and close everything."""
        self._loop.set_timer(self, None, self._send_timer)
        self._stopped.end()
        for rank, living in self._living.items():
            worker = self._group.workers[rank]
            if not worker.gone:
                living.process.signal_group(signal.SIGKILL)
            if worker.returncode is None:
                self._loop.unwatch(living.process.pidfd)
            self._close_streams(rank)
            self._close_channel(living)
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
        self._living[rank].streams.remove(stream)
        stream.close()

    def _close_streams(self, rank: int) -> None:
        for stream in list(self._living[rank].streams):
            self._close_stream(rank, stream)

    def _close_channel(self, living: LivingWorker) -> None:
        if living.channel is not None:
            self._loop.unwatch(living.channel.fileno())
            living.channel.close()
            living.channel = None

    def _worker_exited(self, rank: int) -> None:
        living = self._living[rank]
        process = living.process
        if living.channel is not None:
            self._read_channel(rank)  # it may have said that all have finished
            self._close_channel(living)
        for stream in living.streams:
            stream.drain()
        self._loop.unwatch(process.pidfd)
        returncode = process.reap()
        leftovers = self._watch_leftovers(rank)
        error = living.output.error() if returncode else None
        blames_peer = error.blames_peer if error else any(map(is_blame, living.output.last_lines()))
        raised_ns = error.time_ns if error else 0
        # Without a traceback, the last output is the message itself: once is enough.
        what = _headline(error) if error and error.traceback else ""
        self._step_group(Exited(rank, returncode, blames_peer, leftovers, raised_ns, what))
        worker = self._group.workers[rank]
        if worker.was_killed_late and not worker.signum:
            self._screen.tell(f"{worker.describe()}; all ranks had finished their training")
        if returncode == 0 and not worker.has_completed:
            # In a training of the others, which may wait for a place since it has left them. Processes that it has left
            # behind make no difference.
            self._listener.note_world_left()
        if blames_peer:
            self._find_replaced()

    def _watch_leftovers(self, rank: int) -> bool:
        """Watch the processes that an exited worker left behind. Return whether there are any."""
        pidfds = self._living[rank].process.open_group()
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
            for stream in self._living[rank].streams:
                stream.drain()
            if not self._watch_leftovers(rank):  # they may have started others
                self._step_group(Vacated(rank))

    # Effects

    def _send_timer(self) -> None:
        self._step_group(GroupTimer())

    def _step_group(self, event: Event) -> None:
        effects = self._group.step(time.monotonic_ns(), event)
        if self.survivors != self._continuing:
            self._continuing = self.survivors
            self._listener.note_continuing(self._continuing)
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
                        self._living[rank].process.signal_group(signum)
                        # A stopped process would not receive the signal.
                        self._living[rank].process.signal_group(signal.SIGCONT)
                case SetGroupTimer(at_ns):
                    self._loop.set_timer(self, at_ns, self._send_timer)
                case GroupSettled():
                    self._listener.note_settled()
                case GroupEnd():
                    self._finished = True
                    self._stopped.end()
                    self._loop.set_timer(self, None, self._send_timer)
                    self._listener.note_end(effect)


def unwatch_worker(loop: Loop, worker: LivingWorker) -> None:
    """Stop serving what belongs to a worker; the next owner goes on."""
    loop.unwatch(worker.process.pidfd)
    if worker.channel is not None:
        loop.unwatch(worker.channel.fileno())
    for stream in worker.streams:
        loop.set_timer(stream, None, stream.show_prompt)
        loop.unwatch(stream.fileno())


def _headline(error: ErrorReport | None) -> str:
    """Return the first line of the exception in an error file, for a sentence; empty without one."""
    line = error.message.partition("\n")[0] if error else ""
    return line if len(line) <= MOST_OF_ERROR else line[: MOST_OF_ERROR - 3] + "..."


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
