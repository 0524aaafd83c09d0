r"""Decides about the workers of one run, from their start until the last one is gone. Pure.

Rules

1. If every worker ends with exit code 0, so does the job, without a message. One that does so while others run has no
   effect: ranks that still need it learn of its departure from each other, if they have met. But if another worker has
   come to a later epoch of the world (`ronde.init`) and waits there, the worker that ended has failed. The shell finds
   out whether one of another node waits (`WorkerGroup.absent`), also after the last worker has ended.
2. The first worker to fail is the cause: its exit code is the job's (128 + signal for a killed worker). A worker that
   fails because it lost a peer is the cause only until another worker fails for another reason. If two failed workers
   tell when they raised their exceptions, the earlier exception is the cause, whichever worker ends first. A worker has
   failed as soon as it announces an exception, even if it then exits with 0.
3. After the first failure the others have a grace period: most notice the failure within a second, and their output
   helps to explain it. Those that remain get SIGTERM, and after the patience SIGKILL. If all workers start again
   (`Policy.starts_again`), the grace period ends with the cause.
   A worker that has announced an exception joins threads and runs its exit handlers, which may save something. The
   grace period lasts until it has ended, but not beyond the farewell, and another reason to stop does not signal it.
   It lasts as long for a worker that has left the other ranks while another one blames a peer: its exit code is known
   only when its exit handlers have run, for example after `sys.exit(3)`.
4. An interrupt (a signal to the agent) is forwarded at once. SIGKILL follows after the farewell, in which workers
   may save their state; after an interrupt typed at a terminal (Ctrl-C, Ctrl-\), where the user waits, it follows after
   the patience. A second, typed interrupt kills at once. The exit code is 128 + signal, unless a worker failed before.
   Later failures do not count. SIGPIPE (the agent's output is broken) is forwarded as SIGTERM, because Python
   ignores SIGPIPE.
5. A worker is gone when its process has exited and no process of its group is left. Processes that outlive the last
   worker have a second to end, as helpers of Python's multiprocessing do; then they are ended like workers that outlive
   a failure. They do not affect the result.
6. `StopGroup` ends all workers by SIGTERM, and after the patience by SIGKILL; with `at_once` by SIGKILL. Later failures
   do not count.
7. Every wait ends: processes that survive SIGKILL for the patience are reported and left.
8. A worker that has sent `Continues` (`process/membership_channel`) and still runs well can outlive the round. If all
   workers start again after a failure, only the others are signalled, and a failure that blames a peer is the cause
   after the grace period. After a `StopGroup` with `keeps`, `GroupSettled` follows as soon as no process is left but
   those of workers that continue: the next run begins with them. Those that are about to end after an exception have
   a second then, because the others wait for them. With `at_once`, too, those that are still in the world of this run
   after `Policy.leave_ns` are killed, and `GroupSettled` waits until all others have left it. If the workers do not
   start again, those that continue are asked to end at once, because they would wait for a new round.
9. When all ranks have finished (`WorkerCompleted`), there is nothing to recover: a worker that came too late for this
   world, and waits in `ronde.init` for workers that have ended with exit code 0, is ended and does not count as failed.
   Nor does one that a signal kills then, and nobody waits for workers to leave the world. One that fails in another way
   is the cause, and the others have the grace period, but the workers do not start again (`GroupEnd.is_late`).

Theory of operation

The phase only moves forward, from any phase to any later one:

    RUNNING --failure--> GRACE --timer--> STOPPING --timer--> KILLING --timer--> FINISHED
       |                   |                  ^ |                ^
       +-----interrupt-----+------------------+ +-second Ctrl-C--+

and to FINISHED as soon as all workers are gone. A group that has settled begins again with RUNNING if the agent ends
those that are left. Processes that the last worker leaves behind begin a GRACE, too, or shorten it. GRACE, STOPPING and
KILLING have one deadline each; an early `GroupTimer` is answered with another `SetGroupTimer`, a late one acts at once.
The shell reports events in the order in which it learned of them, performs the effects in order, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from ronde.launch.agent.worker import Worker, name_ranks, signal_name

__all__ = [
    "HASTY",
    "TYPED",
    "Absent",
    "Effect",
    "Event",
    "Exited",
    "GroupEnd",
    "GroupSettled",
    "GroupTimer",
    "InterruptGroup",
    "NoRoundFollows",
    "NotStarted",
    "Policy",
    "SetGroupTimer",
    "SignalWorkers",
    "Started",
    "StopGroup",
    "Vacated",
    "WorkerAwaits",
    "WorkerCompleted",
    "WorkerContinues",
    "WorkerGroup",
    "WorkerJoined",
    "WorkerJoins",
    "WorkerLeft",
    "WorkerMissed",
    "WorkerRaised",
    "WorkerReplaced",
    "describe_interrupt",
]


# Events


@dataclass(frozen=True)
class Started:
    """The worker's process runs.

    `since_ns`: when it started, if not now. `continues`: it has said so in an earlier run (rule 8).
    """

    rank: int
    pid: int
    since_ns: int | None = None
    continues: bool = False


@dataclass(frozen=True)
class NotStarted:
    """The worker's process cannot start; the shell starts no further ones."""

    rank: int
    problem: str


@dataclass(frozen=True)
class Exited:
    """The worker's own process ended.

    `returncode`: its exit code, or minus the signal that killed it. `blames_peer`: its error reports a lost rank.
    `leftovers`: processes of its group are left, whose end `Vacated` reports. `raised_ns`: the time of the exception
    that ended it, on a clock that all workers share; 0: unknown. `what`: that exception; empty if it left none.
    """

    rank: int
    returncode: int
    blames_peer: bool = False
    leftovers: bool = False
    raised_ns: int = 0
    what: str = ""


@dataclass(frozen=True)
class WorkerRaised:
    """The worker has announced an uncaught exception and is about to end, which may take long.

    The data are as in `Exited`.
    """

    rank: int
    what: str
    blames_peer: bool = False
    raised_ns: int = 0


@dataclass(frozen=True)
class WorkerLeft:
    """The worker has left the other ranks, and may take long to end. Its exit code is not known yet."""

    rank: int


@dataclass(frozen=True)
class WorkerJoins:
    """The worker has come to an epoch of the world of all ranks. It cannot have joined before all of them have come."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class WorkerJoined:
    """The worker has joined the world of the epoch to which it came, or has given up."""

    rank: int


@dataclass(frozen=True)
class WorkerReplaced:
    """The worker has lost its connections to the other ranks without leaving them: its process runs another program.

    `program`: the words that started it.
    """

    rank: int
    program: str


@dataclass(frozen=True)
class WorkerContinues:
    """From now on the worker outlives the end of a round."""

    rank: int


@dataclass(frozen=True)
class WorkerAwaits:
    """The worker has left the world of the group's round, and waits for a later one."""

    rank: int


@dataclass(frozen=True)
class WorkerCompleted:
    """The worker knows that all ranks have finished, and is about to end."""

    rank: int


@dataclass(frozen=True)
class WorkerMissed:
    """A rank of another node waits in `ronde.init` for this worker, which has ended with exit code 0.

    `by`: the rank that waits. The only event that may come after `GroupEnd`: it takes back one of exit code 0.
    """

    rank: int
    by: int


@dataclass(frozen=True)
class Vacated:
    """The last process of an exited worker's group is gone."""

    rank: int


@dataclass(frozen=True)
class InterruptGroup:
    """The agent received a signal that ends the job."""

    signum: int


@dataclass(frozen=True)
class StopGroup:
    """The agent ends these workers; `at_once`: by SIGKILL. `keeps`: but those that continue (rule 8)."""

    reason: str
    at_once: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class NoRoundFollows:
    """The workers do not start again, so those that continue have nothing to wait for."""

    reason: str


@dataclass(frozen=True)
class GroupTimer:
    """The time of the last `SetGroupTimer` has come, or the shell woke up early."""


Event = (
    Started
    | NotStarted
    | WorkerRaised
    | WorkerContinues
    | WorkerAwaits
    | WorkerCompleted
    | WorkerJoins
    | WorkerJoined
    | WorkerLeft
    | WorkerMissed
    | WorkerReplaced
    | Exited
    | Vacated
    | InterruptGroup
    | StopGroup
    | NoRoundFollows
    | GroupTimer
)


# Effects


@dataclass(frozen=True)
class SignalWorkers:
    """Send the signal to all processes of these ranks' groups; `reason` is for the user."""

    ranks: tuple[int, ...]
    signum: int
    reason: str


@dataclass(frozen=True)
class SetGroupTimer:
    """Send `GroupTimer` at this time; it replaces any earlier one."""

    at_ns: int


@dataclass(frozen=True)
class GroupEnd:
    """The run is over; the report shows the last output of `failed_rank`.

    After a `GroupEnd` with exit code 0, a `WorkerMissed` may cause a second one, with the failure. `is_late`: the
    worker has failed when all ranks had finished the training, so another run would only repeat it.
    """

    exit_code: int
    reason: str
    failed_rank: int | None = None
    is_late: bool = False


@dataclass(frozen=True)
class GroupSettled:
    """No process is left but those of workers that continue. `GroupEnd` follows only if they are ended or fail, too."""


Effect = SignalWorkers | SetGroupTimer | GroupSettled | GroupEnd


GRACE_NS, PATIENCE_NS, FAREWELL_NS, STRAGGLER_NS = 3 * 10**9, 5 * 10**9, 30 * 10**9, 300 * 10**9
SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGPIPE, SIGTERM = 1, 2, 3, 9, 13, 15
TYPED = (SIGINT, SIGQUIT)  # Ctrl-C and Ctrl-\, by a user who waits at a terminal
HASTY = (*TYPED, SIGPIPE)  # workers get no time to save their state
LEAVING_NS = 1_000_000_000  # how long processes may take to end after their worker
CANNOT_START = 126  # the exit code of shells for a command that exists but cannot start


@dataclass(frozen=True)
class Policy:
    """Time limits: `grace_ns` for workers to notice a failure, `patience_ns` from SIGTERM to SIGKILL.

    `starts_again`: the workers start again, so the agent does not wait for their output. `stop_signum`: the signal that
    asks them to end. `farewell_ns`: how long workers may take to end after a signal from outside that was not typed.
    `straggler_ns`: how long a worker may stay in a world that another one has left. `leave_ns`: how long a worker that
    continues may take to leave its world when the others may go on without this node.
    """

    grace_ns: int = GRACE_NS
    patience_ns: int = PATIENCE_NS
    starts_again: bool = False
    stop_signum: int = SIGTERM
    farewell_ns: int = FAREWELL_NS
    straggler_ns: int = STRAGGLER_NS
    leave_ns: int = 10**9 // 2


class GroupPhase(IntEnum):
    """How far the group has come; it never goes back."""

    RUNNING = 0
    GRACE = 1
    STOPPING = 2
    KILLING = 3
    FINISHED = 4


@dataclass(frozen=True)
class Absent:
    """A worker that has ended with exit code 0, after it had come to the last of `epochs` epochs."""

    rank: int
    epochs: int


class WorkerGroup:
    """The machine: one attempt at running one group of workers of given ranks."""

    def __init__(self, ranks: Iterable[int], policy: Policy | None = None) -> None:
        self._unstarted = set(ranks)
        self._policy = policy or Policy()
        self._phase = GroupPhase.RUNNING
        self._deadline_ns = 0  # of the phase, if it has one
        self._given_ns = 0  # how long the phase may last
        self._grace_since_ns = 0
        self._failed: Worker | None = None
        self._interrupt = 0  # the signal of the first interrupt
        self._ends_all = False  # no worker lives on
        self._keeps = False  # the run is to end, and those that continue live on
        self._has_settled = False
        self._must_leave = False  # those that continue must leave their world
        self._is_leaving_over = False  # the time for that is up
        self._has_waited = False  # for a better cause than a failure that blames a peer
        self._has_completed = False  # all ranks have finished
        self._straggler_end_ns = 0  # when workers must have left the world that another one has left
        self.workers: dict[int, Worker] = {}

    @property
    def _asking(self) -> int:
        return self._policy.stop_signum

    @property
    def cause(self) -> int | None:
        """The rank of the cause, once a worker has failed for another reason than a lost peer; else None.

        Also None if that is of no concern to others, because all ranks have finished the training.
        """
        if self._is_late:
            return None
        is_known = self._failed and (self._has_waited or not self._failed.blames_peer)
        return self._failed.rank if self._failed and is_known else None

    @property
    def _is_late(self) -> bool:
        """Whether a worker has failed when all ranks had finished the training, and none has begun another one."""
        return self._has_completed and self._failed is not None and self._failed.has_completed

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks of the workers that outlive this run, in order."""
        return tuple(
            rank
            for rank, worker in sorted(self.workers.items())
            if worker.continues and (worker.awaits or not self._is_leaving_over)
        )

    @property
    def awaits_exit(self) -> bool:
        """Whether a worker has left the other ranks and still runs: its exit code may be the cause of failures."""
        return any(worker.may_be_cause for worker in self.workers.values())

    @property
    def absent(self) -> Absent | None:
        """The worker that ranks of other nodes would miss first; None if none has ended, or if the run has failed."""
        if self._failed or self._interrupt or self._phase in (GroupPhase.STOPPING, GroupPhase.KILLING):
            return None
        ended = [worker for worker in self.workers.values() if worker.has_succeeded]
        first = min(ended, key=lambda worker: (worker.epochs, worker.rank), default=None)
        return Absent(first.rank, first.epochs) if first else None

    @property
    def phase(self) -> GroupPhase:
        """How far the group has come."""
        return self._phase

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return the effects of the event, of which the shell learned at `now_ns` of its monotonic clock."""
        if self._phase == GroupPhase.FINISHED:
            return self._noted_at_the_end(event)
        match event:
            case Started():
                self._unstarted.discard(event.rank)
                since_ns = now_ns if event.since_ns is None else event.since_ns
                self.workers[event.rank] = Worker(
                    event.rank, event.pid, since_ns, has_announced=event.continues
                )
                effects: list[Effect] = []
            case NotStarted():
                effects = self._not_started(now_ns, event)
            case WorkerRaised():
                effects = self._raised(now_ns, event)
            case (
                WorkerContinues()
                | WorkerAwaits()
                | WorkerCompleted()
                | WorkerJoins()
                | WorkerJoined()
                | WorkerLeft()
                | WorkerMissed()
                | WorkerReplaced()
            ):
                effects = self._noted(now_ns, event)
            case Exited():
                effects = self._exited(now_ns, event)
            case Vacated():
                self.workers[event.rank].leftovers = False
                effects = self._check_joins(now_ns)
            case InterruptGroup():
                effects = self._interrupted(now_ns, event.signum)
            case StopGroup() | NoRoundFollows():
                effects = self._unwanted(now_ns, event)
            case GroupTimer():
                effects = self._timer(now_ns)
        return self._completed(effects)

    def _completed(self, effects: list[Effect]) -> list[Effect]:
        """Return these effects, with the end of the run if it is over."""
        if self._unstarted or self._remaining():
            return effects
        if not self.survivors:
            return [self._finish("")]
        if self._must_leave and not all(self.workers[rank].awaits for rank in self.survivors):
            return effects
        if self._keeps and not self._has_settled:
            self._has_settled = True
            effects.append(GroupSettled())
        return effects

    def _remaining(self) -> tuple[int, ...]:
        """Return the ranks of which processes are left that are to end in this run."""
        kept = self.survivors if self._spares_survivors else ()
        return tuple(
            rank for rank, worker in sorted(self.workers.items()) if not worker.gone and rank not in kept
        )

    @property
    def _spares_survivors(self) -> bool:
        spares = self._policy.starts_again and self._failed is not None and not self._is_late
        return self._keeps or (spares and not (self._interrupt or self._ends_all))

    def _not_started(self, now_ns: int, event: NotStarted) -> list[Effect]:
        worker = Worker(event.rank, 0, now_ns, now_ns, CANNOT_START, problem=event.problem)
        self.workers[event.rank] = worker
        self._unstarted.clear()
        self._failed = self._failed or worker
        return self._stop(now_ns, self._asking, f"rank {event.rank} could not be started")

    def _raised(self, now_ns: int, event: WorkerRaised) -> list[Effect]:
        worker = self.workers.get(event.rank)
        if worker is None or worker.returncode is not None or worker.raised or worker.signum:
            return []
        worker.raised, worker.ended_ns = event.what, now_ns
        worker.blames_peer, worker.raised_ns = event.blames_peer, event.raised_ns
        return [] if self._interrupt else self._failed_by_itself(now_ns, worker)

    def _replaced(self, now_ns: int, worker: Worker, program: str) -> list[Effect]:
        if worker.returncode is not None or worker.failed_by_itself or worker.signum:
            return []
        worker.program, worker.ended_ns = program, now_ns
        return [] if self._interrupt else self._failed_by_itself(now_ns, worker)

    def _noted(
        self,
        now_ns: int,
        event: WorkerContinues
        | WorkerAwaits
        | WorkerCompleted
        | WorkerJoins
        | WorkerJoined
        | WorkerLeft
        | WorkerMissed
        | WorkerReplaced,
    ) -> list[Effect]:
        worker = self.workers.get(event.rank)
        if worker is None:
            return []
        if isinstance(event, WorkerContinues | WorkerCompleted):
            if worker.has_completed != isinstance(event, WorkerCompleted):
                # A worker that continues after it has completed begins another training.
                self._has_completed = worker.has_completed = not worker.has_completed
            worker.has_announced = True
            if worker.has_completed:
                self._straggler_end_ns = 0
            return self._check_joins(now_ns)
        if isinstance(event, WorkerAwaits):
            return self._awaits(now_ns, worker)
        if isinstance(event, WorkerReplaced):
            return self._replaced(now_ns, worker, event.program)
        if isinstance(event, WorkerLeft):
            worker.has_left = True
            return []
        if isinstance(event, WorkerMissed):
            return self._failed_by_itself(now_ns, worker) if self._note_missed(worker, event.by) else []
        worker.is_joining = isinstance(event, WorkerJoins)
        if isinstance(event, WorkerJoins):
            worker.epochs = max(worker.epochs, event.epoch + 1)
        return self._check_joins(now_ns)

    def _awaits(self, now_ns: int, worker: Worker) -> list[Effect]:
        worker.awaits = True
        if self._straggler_end_ns or self._phase != GroupPhase.RUNNING:
            return []
        self._straggler_end_ns = now_ns + self._policy.straggler_ns
        return [SetGroupTimer(self._straggler_end_ns)]

    def _kill_stragglers(self, now_ns: int) -> list[Effect]:
        """Kill the workers that stay in the world that others have left: these wait for them. That is their failure."""
        if now_ns < self._straggler_end_ns:
            return [SetGroupTimer(self._straggler_end_ns)]
        running = [worker for worker in self.workers.values() if worker.returncode is None]
        late = tuple(sorted(worker.rank for worker in running if not worker.awaits))
        if not self._straggler_end_ns or not late:
            return []
        self._straggler_end_ns = 0
        left = name_ranks(worker.rank for worker in running if worker.awaits)
        waited = f"{self._policy.straggler_ns / 1e9:g} s"
        for rank in late:
            self.workers[rank].killed_because = (
                f"it was still in the world that {left} had left {waited} before (--start-timeout): "
                "state.end_stuck_steps() prints the stacks of such a worker"
            )
        return [SignalWorkers(late, SIGKILL, f"still in the world that {left} left {waited} ago")]

    def _check_joins(self, now_ns: int) -> list[Effect]:
        """Fail a worker that has ended with exit code 0, and for which others wait in `ronde.init`."""
        if self._phase != GroupPhase.RUNNING:
            return []
        for worker in self.workers.values():
            if worker.has_succeeded:
                worker.missed_by = tuple(
                    rank
                    for rank, other in sorted(self.workers.items())
                    if other.returncode is None and other.is_joining and other.epochs > worker.epochs
                )
                if worker.missed_by and self._has_completed:
                    return self._end_surplus(worker)
                if worker.missed_by:
                    return self._failed_by_itself(now_ns, worker)
        return []

    def _end_surplus(self, ended: Worker) -> list[Effect]:
        """End the workers that wait for one that had finished when they came."""
        late, ended.missed_by = ended.missed_by, ()
        for rank in late:
            self.workers[rank].signum = SIGKILL
        return [SignalWorkers(late, SIGKILL, "all ranks had finished when this worker came")]

    def _note_missed(self, worker: Worker, by: int) -> bool:
        """Note that a rank of another node waits for this worker. Return whether the worker has failed by that."""
        if self.absent is None or not worker.has_succeeded or self._has_completed:
            return False
        worker.missed_by = (by,)
        return True

    def _noted_at_the_end(self, event: Event) -> list[Effect]:
        if isinstance(event, WorkerMissed) and (worker := self.workers.get(event.rank)):
            if self._note_missed(worker, event.by):
                self._failed = worker
                return [self._finish("")]
        return []

    def _exited(self, now_ns: int, event: Exited) -> list[Effect]:
        worker = self.workers[event.rank]
        worker.returncode, worker.leftovers, worker.error = event.returncode, event.leftovers, event.what
        if not worker.raised:
            worker.blames_peer, worker.raised_ns = event.blames_peer, event.raised_ns
        if not ((worker.raised and worker.signum) or worker.program):  # else the announcement has the time
            worker.ended_ns = now_ns
        effects: list[Effect] = []
        if worker.failed_by_itself and not self._interrupt:
            effects = self._failed_by_itself(now_ns, worker)
        elif worker.has_left and self._failed and self._phase == GroupPhase.GRACE:
            effects = self._failed_by_itself(now_ns, self._failed)  # it was not the cause
        if self._phase < GroupPhase.STOPPING and self._only_leftovers():
            if self._phase < GroupPhase.GRACE or now_ns + LEAVING_NS < self._deadline_ns:
                return effects + self._enter(GroupPhase.GRACE, now_ns, LEAVING_NS)
        return effects or self._check_joins(now_ns)

    def _failed_by_itself(self, now_ns: int, worker: Worker) -> list[Effect]:
        if self._failed not in (None, worker) and not worker.causes(self._failed):
            return []
        self._failed = worker
        if self._phase >= GroupPhase.STOPPING:
            return []
        starts_again, is_cause = self._policy.starts_again, self.cause is not None
        if starts_again and is_cause and self.survivors and not self._remaining():
            return []  # the others continue, and the agent decides when this run ends
        if is_cause and (self.survivors if not starts_again else not worker.is_ending):
            return self._stop(now_ns, self._asking, f"rank {worker.rank} failed", spare=True)
        if self._phase < GroupPhase.GRACE:
            self._grace_since_ns = now_ns
            self._deadline_ns = now_ns + self._policy.grace_ns
        awaits_cause = worker.blames_peer and self.awaits_exit
        if worker.is_ending or awaits_cause:
            until_ns = self._grace_since_ns + max(self._policy.grace_ns, self._policy.farewell_ns)
        else:
            until_ns = min(self._deadline_ns, now_ns + self._policy.grace_ns)
        return self._enter(GroupPhase.GRACE, now_ns, max(1, until_ns - now_ns))

    def _only_leftovers(self) -> bool:
        running = any(worker.returncode is None for worker in self.workers.values())
        return not self._unstarted and not running and bool(self._remaining())

    def _interrupted(self, now_ns: int, signum: int) -> list[Effect]:
        again = self._interrupt != 0
        self._keeps = False
        if self._has_settled and not again:
            self._phase = GroupPhase.RUNNING  # of those that are left
        self._interrupt = self._interrupt or signum
        self._unstarted.clear()  # no further worker starts
        if self._phase == GroupPhase.KILLING or not self.workers:
            return []
        if again and signum in TYPED:
            return self._kill(now_ns, f"{'Ctrl-C' if signum == SIGINT else signal_name(signum)} again")
        asking = self._asking if signum == SIGPIPE else signum
        given_ns = self._policy.patience_ns if signum in HASTY else self._policy.farewell_ns
        return self._stop(now_ns, asking, describe_interrupt(signum), given_ns)

    def _unwanted(self, now_ns: int, event: StopGroup | NoRoundFollows) -> list[Effect]:
        if isinstance(event, NoRoundFollows):
            self._ends_all, self._keeps = True, False
            return self._stop(now_ns, self._asking, event.reason, spare=True) if self.survivors else []
        self._keeps = event.keeps and not self._interrupt
        self._ends_all = not event.keeps
        if event.at_once and self._keeps:
            return self._leave_world(now_ns, event.reason)
        if not self._remaining():
            return []
        if event.at_once and self._phase < GroupPhase.KILLING:
            return self._kill(now_ns, event.reason)
        stops = self._phase < GroupPhase.STOPPING or self._has_settled
        if self._has_settled and not event.keeps:
            self._phase = GroupPhase.RUNNING  # of those that are left
        return self._stop(now_ns, self._asking, event.reason, spare=True) if stops else []

    def _leave_world(self, now_ns: int, reason: str) -> list[Effect]:
        """Kill the workers that do not continue, and later those that have not left their world by then."""
        self._must_leave = True
        effects = self._signal(SIGKILL, reason)
        return effects + self._enter(GroupPhase.STOPPING, now_ns, self._policy.leave_ns)

    def _patience_ns(self) -> int:
        """Return how long workers may take to end: shorter for those that are about to, if others wait for that."""
        patience_ns = self._policy.patience_ns
        leaving = (self.workers[rank] for rank in self._remaining())
        is_soon = all(worker.is_ending or worker.returncode is not None for worker in leaving)
        return (
            min(LEAVING_NS, patience_ns)
            if self._spares_survivors and self.survivors and is_soon
            else patience_ns
        )

    def _timer(self, now_ns: int) -> list[Effect]:
        if self._phase == GroupPhase.RUNNING:
            return self._kill_stragglers(now_ns)
        if now_ns < self._deadline_ns:
            return [SetGroupTimer(self._deadline_ns)]
        if self._awaits_better_cause:
            assert self._failed is not None
            self._has_waited = True
            return self._failed_by_itself(now_ns, self._failed)
        self._is_leaving_over = self._must_leave
        if not self._remaining():
            return []
        if self._phase == GroupPhase.GRACE:
            if self._only_leftovers():
                return self._stop(now_ns, self._asking, "the workers have ended but left processes behind")
            assert self._failed is not None
            waited = f"{round((now_ns - self._failed.ended_ns) / 1e9, 1):g} s"
            what = f"raised {self._failed.raised}" if self._failed.is_ending else "failed"
            if self._failed.missed_by:
                what = "ended"
            elif self._failed.program:
                what = "replaced its program"
            return self._stop(
                now_ns, self._asking, f"still running {waited} after rank {self._failed.rank} {what}"
            )
        if self._phase == GroupPhase.STOPPING:
            return self._kill(now_ns, f"still running {self._given_ns / 1e9:g} s later")
        return [self._finish(f"; {name_ranks(self._remaining())} could not be killed")]

    @property
    def _awaits_better_cause(self) -> bool:
        """Whether the grace period is for a failure that blames a peer, of workers of which others continue."""
        failed = self._failed
        is_blame = self._phase == GroupPhase.GRACE and failed is not None and failed.blames_peer
        return is_blame and bool(self.survivors) and not self._is_late

    def _stop(
        self, now_ns: int, signum: int, reason: str, given_ns: int | None = None, *, spare: bool = False
    ) -> list[Effect]:
        """Signal all workers to end within the patience or `given_ns`. A second call does not extend the time.

        `spare`: do not signal those that are about to end after an exception.
        """
        spared = {rank for rank, worker in self.workers.items() if spare and worker.is_ending}
        effects = self._signal(signum, reason, spared)
        if self._phase < GroupPhase.STOPPING:
            effects += self._enter(
                GroupPhase.STOPPING, now_ns, self._patience_ns() if given_ns is None else given_ns
            )
        return effects

    def _kill(self, now_ns: int, reason: str) -> list[Effect]:
        return [
            *self._signal(SIGKILL, reason),
            *self._enter(GroupPhase.KILLING, now_ns, self._policy.patience_ns),
        ]

    def _signal(self, signum: int, reason: str, spared: Collection[int] = ()) -> list[Effect]:
        ranks = tuple(rank for rank in self._remaining() if rank not in spared)
        for rank in ranks:
            if self.workers[rank].returncode is None:
                self.workers[rank].signum = signum
        return [SignalWorkers(ranks, signum, reason)] if ranks else []

    def _enter(self, phase: GroupPhase, now_ns: int, given_ns: int) -> list[Effect]:
        self._phase, self._given_ns = phase, given_ns
        self._deadline_ns = now_ns + given_ns
        return [SetGroupTimer(self._deadline_ns)]

    def _finish(self, remark: str) -> GroupEnd:
        self._phase = GroupPhase.FINISHED
        if failed := self._failed:
            is_late = self._is_late
            if is_late:
                failed = self._find_killed(failed)
                remark = f"; all ranks had finished their training, so it is not repeated{remark}"
            code = failed.exit_code
            return GroupEnd(
                code if code > 0 else 128 - code, failed.describe() + remark, failed.rank, is_late
            )
        if self._interrupt:
            return GroupEnd(128 + self._interrupt, describe_interrupt(self._interrupt) + remark)
        return GroupEnd(0, f"{name_ranks(self.workers)} succeeded{remark}")

    def _find_killed(self, failed: Worker) -> Worker:
        """Return the worker that a signal has killed, if this one has failed because it was lost; else this one."""
        killed = (each for each in self.workers.values() if each.was_killed_late and not each.signum)
        return next(killed, failed) if failed.blames_peer else failed


def describe_interrupt(signum: int) -> str:
    """Return why the job ends after a signal to the launcher."""
    if signum == SIGPIPE:
        return "the output cannot be written any more"
    return "interrupted by Ctrl-C" if signum == SIGINT else f"ended by {signal_name(signum)}"
