r"""What a supervisor decides about its workers, from their start to the last of them being gone. Pure.

Rules

1. If every worker ends with exit code 0, so does the job. Nothing is said.
2. The first worker to fail is THE failure: its exit code is the job's (128 + signal if a signal killed it). A worker
   that fails because it lost a peer is not the cause: it stands in until a worker fails for a reason of its own. Of
   two that say when their exception was raised, the earlier one is the cause, whichever ends first. A worker has failed
   as soon as it says that it has raised, even if it goes on to end successfully.
3. After the first failure the others have a grace in which to notice by themselves: they do within a second, and what
   they then say is worth having. Whoever is still there gets SIGTERM, and after the patience SIGKILL. Where all are to
   be started again (`Policy.hurry`), nobody gets a grace once the cause has ended.
   A worker that has raised and not yet ended joins threads and runs its exit handlers, which may save something. The
   grace lasts until it has ended, but not beyond the farewell, and another reason to stop does not signal it.
4. An interrupt (a signal that we got) is forwarded at once, with SIGKILL after the farewell, in which workers may save
   what they have; after one that is typed at a terminal (Ctrl-C, Ctrl-\), where somebody waits, after the patience. A
   typed one after another interrupt kills at once. The exit code is 128 + signal, unless a worker had failed before.
   What fails afterwards is no failure. SIGPIPE (our output cannot be written) is forwarded as SIGTERM, because Python
   ignores SIGPIPE.
5. A worker is gone when its own process has exited and no process of its group is left. Processes that outlive the
   last worker have a moment to end by themselves, as helpers of Python's multiprocessing do, and are then ended like
   workers that outlive a failure. They decide nothing.
6. A `StopGroup` ends everybody by SIGTERM, and after the patience by SIGKILL; one `at_once` by SIGKILL. What fails
   afterwards is no failure.
7. Every wait ends: what SIGKILL does not remove within the patience is reported and left.

Theory of operation

The phase only moves forward, from any phase to any later one:

    RUNNING --failure--> GRACE --timer--> STOPPING --timer--> KILLING --timer--> FINISHED
       |                   |                  ^ |                ^
       +-----interrupt-----+------------------+ +-second Ctrl-C--+

and to FINISHED as soon as everybody is gone. What the last worker leaves behind begins a GRACE, too, or shortens it.
GRACE, STOPPING and KILLING have one deadline each; a `GroupTimer` that comes early is answered with `SetGroupTimer`
again, one that comes late acts at once. The shell tells what happened in the order in which it learned of it, performs
the effects in order, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum
from typing import NamedTuple

from ronde.light_dataclasses import dataclass

__all__ = [
    "HASTY",
    "TYPED",
    "Event",
    "Effect",
    "Exited",
    "Finish",
    "InterruptGroup",
    "NotStarted",
    "Policy",
    "WorkerRaised",
    "SetGroupTimer",
    "SignalWorkers",
    "Started",
    "StopGroup",
    "GroupTimer",
    "Vacated",
    "Worker",
    "WorkerGroup",
    "describe_interrupt",
    "name_ranks",
]

GRACE_NS, PATIENCE_NS, FAREWELL_NS = 3 * 10**9, 5 * 10**9, 30 * 10**9
SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGPIPE, SIGTERM = 1, 2, 3, 9, 13, 15
TYPED = (SIGINT, SIGQUIT)  # by a user at a terminal, who waits: Ctrl-C and Ctrl-\
HASTY = (*TYPED, SIGPIPE)  # nobody waits for what workers would still save
LEAVING_NS = 1_000_000_000  # for processes that end because their worker has
UNCAUGHT = 1  # the exit code of a Python process after an exception
CANNOT_START = 126  # the exit code by which shells say that a command was found but could not be started

# The same numbers on every Linux that we run on; the rest are called by number.
_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip


# What happens.


class Started(NamedTuple):
    """The worker's process runs."""

    rank: int
    pid: int


class NotStarted(NamedTuple):
    """The worker's process could not be started; the shell starts no further ones."""

    rank: int
    problem: str


class Exited(NamedTuple):
    """The worker's own process ended.

    `returncode` is its exit code, or minus the signal that killed it. `blames_peer`: its last words were that it had
    lost another rank. `leftovers`: processes of its group are still there; `Vacated` will tell when they are not.
    `raised_ns`: when the exception that ended it was raised, on a clock that all workers share; 0: it does not say.
    """

    rank: int
    returncode: int
    blames_peer: bool = False
    leftovers: bool = False
    raised_ns: int = 0


class WorkerRaised(NamedTuple):
    """The worker has raised an exception that nobody catches, so it is going to end; it may take its time.

    `what` is the exception; the rest is as in `Exited`.
    """

    rank: int
    what: str
    blames_peer: bool = False
    raised_ns: int = 0


class Vacated(NamedTuple):
    """The last process of the group of a worker that had exited is gone."""

    rank: int


class InterruptGroup(NamedTuple):
    """The supervisor itself got a signal that means: end the job."""

    signum: int


class StopGroup(NamedTuple):
    """Whoever supervises does not want these workers any more; `at_once`: not even for as long as SIGTERM takes."""

    reason: str
    at_once: bool = False


class GroupTimer(NamedTuple):
    """The time of the last `SetGroupTimer` has come, or the shell woke up for nothing."""


Event = Started | NotStarted | WorkerRaised | Exited | Vacated | InterruptGroup | StopGroup | GroupTimer


# What is to be done.


class SignalWorkers(NamedTuple):
    """Send the signal to all processes of the groups of these ranks; `reason` is for the user's eyes."""

    ranks: tuple[int, ...]
    signum: int
    reason: str


class SetGroupTimer(NamedTuple):
    """Send `GroupTimer` at this time; it replaces any earlier one."""

    at_ns: int


class Finish(NamedTuple):
    """The job is over. `failed_rank` is whose last words to show."""

    exit_code: int
    reason: str
    failed_rank: int | None = None


Effect = SignalWorkers | SetGroupTimer | Finish


class Policy(NamedTuple):
    """How long to be patient: `grace_ns` for workers to notice a failure, `patience_ns` for each signal to work.

    `hurry`: the workers are to be started again, so nobody waits for what they would say. `stop_signum` asks them to
    end. `farewell_ns` is what workers have to end after a signal that came from outside and was not typed.
    """

    grace_ns: int = GRACE_NS
    patience_ns: int = PATIENCE_NS
    hurry: bool = False
    stop_signum: int = SIGTERM
    farewell_ns: int = FAREWELL_NS


class GroupPhase(IntEnum):
    """How far the group has come; it never goes back."""

    RUNNING = 0
    GRACE = 1
    STOPPING = 2
    KILLING = 3
    FINISHED = 4


@dataclass(slots=True)
class Worker:
    """What is known of one worker."""

    rank: int
    pid: int
    started_ns: int
    ended_ns: int = 0
    returncode: int | None = None  # None while its own process runs
    blames_peer: bool = False
    leftovers: bool = False
    raised_ns: int = 0
    raised: str = ""  # the exception that it has told
    signum: int = 0  # the last signal that we sent while its own process ran
    problem: str = ""  # why it could not be started

    @property
    def gone(self) -> bool:
        """Whether no process of it is left."""
        return self.returncode is not None and not self.leftovers

    @property
    def is_ending(self) -> bool:
        """Whether it has raised an exception, and its process still runs."""
        return bool(self.raised) and self.returncode is None

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed without having been told to end."""
        return bool(self.raised) or (self.returncode not in (None, 0) and not self.signum)

    @property
    def exit_code(self) -> int:
        """Its exit code, or minus the signal that killed it; that of the exception if we had to end it after one."""
        if self.raised and (self.signum or not self.returncode):
            return UNCAUGHT
        return self.returncode or 0

    def causes(self, other: Worker) -> bool:
        """Whether it is rather the cause of the job's failure than another worker that failed before."""
        if self.blames_peer != other.blames_peer:
            return other.blames_peer
        return 0 < self.raised_ns < other.raised_ns

    def describe(self) -> str:
        """Return who it was and how it ended, as the beginning of a sentence."""
        if self.problem:
            return f"rank {self.rank} could not be started: {self.problem}"
        took = f"after {(self.ended_ns - self.started_ns) / 1e9:.1f} s"
        who = f"rank {self.rank} (pid {self.pid})"
        if self.raised and (self.signum or not self.returncode):
            return f"{who} raised {self.raised} {took}"
        if self.returncode is None:
            return f"{who} still runs"
        if self.returncode >= 0:
            return f"{who} failed with exit code {self.returncode} {took}"
        hint = " (out of memory?)" if self.returncode == -SIGKILL and not self.signum else ""
        return f"{who} was killed by {signal_name(-self.returncode)} {took}{hint}"


class WorkerGroup:
    """The machine: one attempt at running one group of workers of given ranks."""

    def __init__(self, ranks: Iterable[int], policy: Policy | None = None) -> None:
        self._unstarted = set(ranks)
        self._policy = policy or Policy()
        self._phase = GroupPhase.RUNNING
        self._deadline_ns = 0  # of the phase, where it has one
        self._given_ns = 0  # how long it may last
        self._grace_since_ns = 0
        self._failed: Worker | None = None
        self._interrupt = 0  # the first one's signal
        self.workers: dict[int, Worker] = {}

    @property
    def _asking(self) -> int:
        return self._policy.stop_signum

    @property
    def cause(self) -> int | None:
        """The rank of THE failure, as soon as there is one that has no other worker to blame."""
        return self._failed.rank if self._failed and not self._failed.blames_peer else None

    @property
    def phase(self) -> GroupPhase:
        """How far the group has come."""
        return self._phase

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do about the event, which the shell learned of at `now_ns` of its own monotonic clock."""
        if self._phase == GroupPhase.FINISHED:
            return []
        match event:
            case Started():
                self._unstarted.discard(event.rank)
                self.workers[event.rank] = Worker(event.rank, event.pid, now_ns)
                effects: list[Effect] = []
            case NotStarted():
                effects = self._not_started(now_ns, event)
            case WorkerRaised():
                effects = self._raised(now_ns, event)
            case Exited():
                effects = self._exited(now_ns, event)
            case Vacated():
                self.workers[event.rank].leftovers = False
                effects = []
            case InterruptGroup():
                effects = self._interrupted(now_ns, event.signum)
            case StopGroup():
                effects = self._unwanted(now_ns, event)
            case GroupTimer():
                effects = self._timer(now_ns)
        if not self._unstarted and not self._remaining():
            return [self._finish("")]
        return effects

    def _remaining(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, worker in self.workers.items() if not worker.gone))

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

    def _exited(self, now_ns: int, event: Exited) -> list[Effect]:
        worker = self.workers[event.rank]
        worker.returncode, worker.leftovers = event.returncode, event.leftovers
        if not worker.raised:
            worker.blames_peer, worker.raised_ns = event.blames_peer, event.raised_ns
        if not (worker.raised and worker.signum):  # else it tells when it raised
            worker.ended_ns = now_ns
        effects: list[Effect] = []
        if worker.failed_by_itself and not self._interrupt:
            effects = self._failed_by_itself(now_ns, worker)
        if self._phase < GroupPhase.STOPPING and self._only_leftovers():
            if self._phase < GroupPhase.GRACE or now_ns + LEAVING_NS < self._deadline_ns:
                return effects + self._enter(GroupPhase.GRACE, now_ns, LEAVING_NS)
        return effects

    def _failed_by_itself(self, now_ns: int, worker: Worker) -> list[Effect]:
        if self._failed not in (None, worker) and not worker.causes(self._failed):
            return []
        self._failed = worker
        if self._phase >= GroupPhase.STOPPING:
            return []
        if self._policy.hurry and not worker.blames_peer and not worker.is_ending:
            return self._stop(now_ns, self._asking, f"rank {worker.rank} failed", spare=True)
        if self._phase < GroupPhase.GRACE:
            self._grace_since_ns = now_ns
            self._deadline_ns = now_ns + self._policy.grace_ns
        if worker.is_ending:
            until_ns = self._grace_since_ns + max(self._policy.grace_ns, self._policy.farewell_ns)
        else:
            until_ns = min(self._deadline_ns, now_ns + self._policy.grace_ns)
        return self._enter(GroupPhase.GRACE, now_ns, max(1, until_ns - now_ns))

    def _only_leftovers(self) -> bool:
        running = any(worker.returncode is None for worker in self.workers.values())
        return not self._unstarted and not running and bool(self._remaining())

    def _interrupted(self, now_ns: int, signum: int) -> list[Effect]:
        again = self._interrupt != 0
        self._interrupt = self._interrupt or signum
        self._unstarted.clear()  # nobody is started any more
        if self._phase == GroupPhase.KILLING or not self.workers:
            return []
        if again and signum in TYPED:
            return self._kill(now_ns, f"{'Ctrl-C' if signum == SIGINT else signal_name(signum)} again")
        asking = self._asking if signum == SIGPIPE else signum
        given_ns = self._policy.patience_ns if signum in HASTY else self._policy.farewell_ns
        return self._stop(now_ns, asking, describe_interrupt(signum), given_ns)

    def _unwanted(self, now_ns: int, event: StopGroup) -> list[Effect]:
        if event.at_once and self._phase < GroupPhase.KILLING:
            return self._kill(now_ns, event.reason)
        stops = self._phase < GroupPhase.STOPPING
        return self._stop(now_ns, self._asking, event.reason, spare=True) if stops else []

    def _timer(self, now_ns: int) -> list[Effect]:
        if self._phase == GroupPhase.RUNNING:
            return []
        if now_ns < self._deadline_ns:
            return [SetGroupTimer(self._deadline_ns)]
        if self._phase == GroupPhase.GRACE:
            if self._only_leftovers():
                return self._stop(now_ns, self._asking, "the workers have ended but left processes behind")
            assert self._failed is not None
            waited = f"{round((now_ns - self._failed.ended_ns) / 1e9, 1):g} s"
            what = f"raised {self._failed.raised}" if self._failed.is_ending else "failed"
            return self._stop(
                now_ns, self._asking, f"still running {waited} after rank {self._failed.rank} {what}"
            )
        if self._phase == GroupPhase.STOPPING:
            return self._kill(now_ns, f"still running {self._given_ns / 1e9:g} s later")
        return [self._finish(f"; {name_ranks(self._remaining())} could not be killed")]

    def _stop(
        self, now_ns: int, signum: int, reason: str, given_ns: int | None = None, *, spare: bool = False
    ) -> list[Effect]:
        """Ask everybody to end, within the patience or `given_ns`. Asking again gives no more time.

        `spare`: those that are ending by themselves need not be asked.
        """
        spared = {rank for rank, worker in self.workers.items() if spare and worker.is_ending}
        effects = self._signal(signum, reason, spared)
        if self._phase < GroupPhase.STOPPING:
            effects += self._enter(
                GroupPhase.STOPPING, now_ns, self._policy.patience_ns if given_ns is None else given_ns
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

    def _finish(self, remark: str) -> Finish:
        self._phase = GroupPhase.FINISHED
        if failed := self._failed:
            code = failed.exit_code
            return Finish(code if code > 0 else 128 - code, failed.describe() + remark, failed.rank)
        if self._interrupt:
            return Finish(128 + self._interrupt, describe_interrupt(self._interrupt) + remark)
        return Finish(0, f"{name_ranks(self.workers)} succeeded{remark}")


def describe_interrupt(signum: int) -> str:
    """Return why the job ends, for a signal that the launcher got."""
    if signum == SIGPIPE:
        return "the output cannot be written any more"
    return "interrupted by Ctrl-C" if signum == SIGINT else f"ended by {signal_name(signum)}"


def signal_name(signum: int) -> str:
    """Return the signal's name, such as SIGKILL."""
    return _SIGNAL_NAMES.get(signum, f"signal {signum}")


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 1, 3"."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))
