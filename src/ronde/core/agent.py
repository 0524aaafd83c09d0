r"""What the agent of one node decides, from its first join to its exit. Pure.

An agent takes part in the rendezvous, runs its workers for as long as a round lasts, and tells the others how they
ended. What happens within one run of the workers, `worker_group` decides; who is in a round, and whether there is to be
another one, the rendezvous.

Rules

1. Workers run only within a round, and never two runs of them at once: before it joins again, an agent waits until all
   processes of the last run are gone.
2. The first worker that fails for a reason of its own ends the round for all nodes: `ReportFailure`. It is told at
   once, while the other workers are still being ended. Whether the job goes on is what the rendezvous answers.
3. Workers that fail because they lost a peer are no cause as long as one of this node may have a better one, so their
   failure is told when all are gone. Whether the cause is on another node, the rendezvous finds out.
4. When all workers have succeeded, the agent waits for the other nodes (the exit barrier), because they may still need
   its store, or fail and make it start again. After the patience it leaves, and has succeeded; but not while others
   need what it serves: the store of the round (group rank 0), or that of the rendezvous.
5. A round that has ended, or that went on without us, ends the workers at once; then we join again.
   Where it is known that no other nodes will come (Slurm starts no task again, and -H no agent of a fixed list) and
   too few are left, the job ends unless a lost one, which may have been cut off only, is back in time.
6. Ctrl-C and Ctrl-\ end the job on all nodes. Other signals take this node away; the others go on if they may.
7. Where nodes can be replaced (`gives_way`), the first failure of a round when no restart is left costs the job its
   node, and not its life: the others go on if they may. That node is told to go, by being left out, because a later
   failure may be only a consequence. Whoever has placed the nodes sees to the rest.
8. Every ending has one reason, and nothing is decided after it.
9. Workers of a node that the others take for dead are killed at once. The others start theirs when the node's lease has
   run out (`core/rendezvous/lease`), and what the old workers would save then might replace what the new ones save.
   The others wait for those of a node that leaves, so these may still save something.

Theory of operation

    INIT --RoundBegan--> HEALTHY --all ended with 0--> SUCCEEDED --AllSucceeded--> exit 0
      ^                     | \
      |                     |  \--a worker fails--> UNHEALTHY --all gone--> FAILED --JobClosed--> exit
      |             RoundEnded, Ejected                 |                     |
      +--all gone-- STOPPED <---------------------------+---------------------+ RoundEnded
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ronde.core.rendezvous.membership import (
    AllSucceeded,
    Budget,
    Ejected,
    Failure,
    JobClosed,
    NodesLost,
    NodesWaiting,
    Notice,
    RendezvousBroken,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
    WorkerFailed,
)
from ronde.core.worker_group import TYPED

__all__ = [
    "Agent",
    "Effect",
    "EndJob",
    "Event",
    "Exit",
    "ReportFailure",
    "Failing",
    "WorkersGone",
    "InterruptAgent",
    "JoinRound",
    "LeaveJob",
    "AgentNotice",
    "SetAgentTimer",
    "StartWorkers",
    "WorkerState",
    "StopWorkers",
    "ReportSuccess",
    "AgentTimer",
]

FAILED, UNREACHABLE = 1, 2  # exit codes for what is no worker's fault


class WorkerState(Enum):
    """How the workers of this node are, in the words of torch's elastic agent."""

    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


# What happens, beside what the rendezvous tells.


class Failing(NamedTuple):
    """A worker has failed for a reason of its own; others may still be there, and are being ended."""

    failure: Failure


class WorkersGone(NamedTuple):
    """No process of the workers is left.

    `exit_code` is 0 if all of them succeeded; `failure` is the first one, None if there was none.
    """

    exit_code: int
    reason: str
    failure: Failure | None = None


class InterruptAgent(NamedTuple):
    """The agent got a signal that means: end. The shell has passed it on to the workers, if there are any."""

    signum: int
    reason: str


class AgentTimer(NamedTuple):
    """The time of the last `SetAgentTimer` has come, or the shell woke up for nothing. `serves`: whether the nodes meet
    at a store that ends with this one.
    """

    serves: bool = False


Event = RendezvousEvent | Failing | WorkersGone | InterruptAgent | AgentTimer


# What is to be done.


class JoinRound(NamedTuple):
    """Ask for the next round."""


class StartWorkers(NamedTuple):
    """Start the workers of the round; `again` says that they may be started again if one fails."""

    round: Round
    again: bool


class StopWorkers(NamedTuple):
    """End the workers; `WorkersGone` comes of it. `at_once`: leave them no time to save anything (rule 9)."""

    reason: str
    at_once: bool = False


class ReportFailure(NamedTuple):
    """Tell the rendezvous that a worker of this round has failed."""

    failure: Failure


class ReportSuccess(NamedTuple):
    """Tell the rendezvous that all workers of this node have succeeded."""


class EndJob(NamedTuple):
    """Close the job for all nodes."""

    reason: str


class LeaveJob(NamedTuple):
    """Tell the rendezvous that this node goes."""

    reason: str


class AgentNotice(NamedTuple):
    """Something for the user's eyes."""

    text: str


class SetAgentTimer(NamedTuple):
    """Send `AgentTimer` at this time; it replaces any earlier one."""

    at_ns: int


class Exit(NamedTuple):
    """It is over. `failure` is the job's first one, on whatever node; `reason` says why where that is no failure.

    `gave_way`: it is over for this node alone.
    """

    code: int
    reason: str
    failure: Failure | None = None
    gave_way: bool = False


Effect = (
    JoinRound
    | StartWorkers
    | StopWorkers
    | ReportFailure
    | ReportSuccess
    | EndJob
    | LeaveJob
    | AgentNotice
    | SetAgentTimer
    | Exit
)


class Agent:
    """The machine: one agent of a job, in any number of rounds.

    `exit_barrier_ns` is how long to wait for others. `gives_way`: rule 7. `supply`: all the nodes that there will ever
    be, None if others may come; the job needs `least`, and waits `shortage_ns` for a lost one if it has fewer.
    """

    def __init__(
        self,
        budget: Budget,
        exit_barrier_ns: int,
        gives_way: bool = False,
        supply: int | None = None,
        least: int = 1,
        shortage_ns: int = 0,
    ) -> None:
        self._budget = budget
        self._gives_way = gives_way
        self._supply = supply
        self._least = least
        self._shortage_ns = shortage_ns
        self._lost: set[str] = set()  # by id, nodes that have not come back
        self._shortage = ""  # why there will be no other round unless one of them does
        self._exit_barrier_ns = exit_barrier_ns
        self._round: Round | None = None  # the one whose workers run or have ended; None while we join
        self._alive = False  # whether there are processes of workers
        self._said = False  # whether this round has our word already: failed, or succeeded
        self._failure: Failure | None = None  # the first one on this node
        self._deadline_ns: int | None = None
        self._rejoin = False  # once the workers are gone
        self._interrupted = False
        self._exit: Exit | None = None  # once the workers are gone
        self._began = False  # some round has
        self._over = False
        self.state = WorkerState.INIT

    def begin(self) -> list[Effect]:
        """Return what to do first."""
        return [JoinRound()]

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return what to do about the event, which the shell learned of at `now_ns` of its own monotonic clock."""
        if self._over:
            return []
        match event:
            case Failing(failure):
                return self._failing(failure)
            case WorkersGone():
                return self._gone(now_ns, event)
            case InterruptAgent(signum, reason):
                return self._interrupt(signum, reason)
            case AgentTimer(serves):
                return self._timer(now_ns, serves)
            case _:
                return self._hear(now_ns, event)

    # What the rendezvous tells

    def _hear(self, now_ns: int, event: RendezvousEvent) -> list[Effect]:
        match event:
            case RoundBegan(round):
                return self._round_began(round)
            case RoundEnded(number, cause):
                return self._round_ended(now_ns, number, cause)
            case Ejected(reason):
                return self._ejected(reason)
            case AllSucceeded(number):
                at_barrier = (
                    self.state is WorkerState.SUCCEEDED and self._round and self._round.number == number
                )
                return self._leave_for_good(Exit(0, "all nodes have succeeded")) if at_barrier else []
            case JobClosed():
                return self._closed(event)
            case RendezvousBroken(reason):
                return self._broken(reason)
            case Notice(text):
                return [AgentNotice(text)]

    def _round_began(self, round: Round) -> list[Effect]:
        if self._round or self._alive:
            return []
        self._round, self._alive, self._began = round, True, True
        self._lost -= {node.id for node in round.nodes}
        self._said, self._failure, self._deadline_ns = False, None, None
        self.state = WorkerState.HEALTHY
        return [StartWorkers(round, round.restarts < self._budget.restarts)]

    def _round_ended(
        self, now_ns: int, number: int, cause: WorkerFailed | NodesLost | NodesWaiting
    ) -> list[Effect]:
        if self._round is None or self._round.number != number:
            return []
        ended = self._round
        effects: list[Effect] = [AgentNotice(self._describe(cause, ended)), *self._again()]
        if isinstance(cause, NodesLost) and (shortage := self._find_shortage(cause, ended)):
            self._shortage, self._deadline_ns = shortage, now_ns + self._shortage_ns
            effects.append(SetAgentTimer(self._deadline_ns))
        return effects

    def _find_shortage(self, cause: NodesLost, round: Round) -> str:
        """Return why there cannot be another round after this loss, nothing if there can."""
        if self._supply is None or self._exit or self._interrupted:
            return ""
        self._lost |= cause.ids(round.nodes)
        left = self._supply - len(self._lost)
        if left >= self._least:
            return ""
        are = "is" if left == 1 else "are"
        return (
            f"{cause.reason}, and nobody starts it again: {left} of {self._supply} nodes {are} left, and the job needs "
            f"{self._least} (--nnodes MIN:MAX, or --min-np with -H, lets it go on with fewer)"
        )

    def _ejected(self, reason: str) -> list[Effect]:
        if self._failure and self._gives_way and not (self._exit or self._interrupted):
            exit = Exit(_exit_code(self._failure), self._failure.message, self._failure, gave_way=True)
            said: list[Effect] = [LeaveJob(exit.reason)] if self._alive else []
            return said + self._leave_for_good(exit, stop=False)
        return [AgentNotice(reason), *self._again(at_once=True)]

    def _again(self, at_once: bool = False) -> list[Effect]:
        """Join again, once the workers are gone."""
        self._round, self._failure, self._deadline_ns = None, None, None
        stop = StopWorkers("the others may have gone on" if at_once else "the round is over", at_once)
        if self._exit or self._interrupted:  # the workers are ending already, though perhaps not in time
            return [stop] if at_once and self._alive else []
        self.state = WorkerState.STOPPED
        if not self._alive:
            return [JoinRound()]
        self._rejoin = True
        return [stop]

    def _closed(self, event: JobClosed) -> list[Effect]:
        if self._interrupted or self._exit:
            return []
        code = 0 if event.completed else FAILED if event.failure is None else _exit_code(event.failure)
        failing = self._said and self.state in (WorkerState.UNHEALTHY, WorkerState.FAILED)
        said = [AgentNotice(f"{event.reason}; this node was not needed")] if event.completed else []
        return said + self._leave_for_good(Exit(code, event.reason, event.failure), stop=not failing)

    def _broken(self, reason: str) -> list[Effect]:
        if self._interrupted or self._exit:
            return []
        if self.state is WorkerState.SUCCEEDED:
            text = f"the workers of this node have succeeded; how the other nodes end is not known: {reason}"
            return [AgentNotice(text), *self._leave_for_good(Exit(0, text))]
        if self.state in (WorkerState.UNHEALTHY, WorkerState.FAILED) and self._failure:
            return self._leave_for_good(Exit(_exit_code(self._failure), reason, self._failure))
        return self._leave_for_good(Exit(FAILED if self._began else UNREACHABLE, reason))

    def _leave_for_good(self, exit: Exit, *, stop: bool = True) -> list[Effect]:
        """Exit, once the workers are gone; those that fail already are being ended as they should."""
        self._deadline_ns, self._rejoin = None, False
        if not self._alive:
            self._over = True
            return [exit]
        self._exit = exit
        return [StopWorkers(exit.reason)] if stop else []

    # What the workers do

    def _failing(self, failure: Failure) -> list[Effect]:
        if not self._alive or self._round is None or self._said or self._exit or self._interrupted:
            return []
        self.state = WorkerState.UNHEALTHY
        self._said, self._failure = True, failure
        return [ReportFailure(failure)]

    def _gone(self, now_ns: int, event: WorkersGone) -> list[Effect]:
        if not self._alive:
            return []
        self._alive = False
        if self._exit or self._interrupted:
            self._over = True
            exit = self._exit or Exit(event.exit_code, event.reason, event.failure)
            if exit.failure and event.failure and _is_same(exit.failure, event.failure):
                # It was told when the exception was raised; how the process ends is known only now.
                exit = Exit(event.exit_code, exit.reason, event.failure, exit.gave_way)
            return [exit]
        if self._rejoin or self._round is None:
            self._rejoin = False
            return [JoinRound()]
        if event.exit_code == 0 and not self._said:
            self.state, self._said = WorkerState.SUCCEEDED, True
            self._deadline_ns = now_ns + self._exit_barrier_ns
            return [ReportSuccess(), SetAgentTimer(self._deadline_ns)]
        self.state = WorkerState.FAILED
        if self._said or event.failure is None:
            return []
        self._failure, self._said = event.failure, True
        return [ReportFailure(event.failure)]

    # Signals and time

    def _interrupt(self, signum: int, reason: str) -> list[Effect]:
        effects: list[Effect] = []
        if not self._interrupted:
            self._interrupted = True
            if self._rejoin:  # what had failed would have been started again
                self._exit = Exit(128 + signum, reason)
            effects = [EndJob(reason) if signum in TYPED else LeaveJob(reason)]
        if not self._alive:
            self._over = True
            effects.append(Exit(128 + signum, reason))
        return effects

    def _timer(self, now_ns: int, serves: bool) -> list[Effect]:
        if self._deadline_ns is None:
            return []
        if now_ns < self._deadline_ns:
            return [SetAgentTimer(self._deadline_ns)]
        self._deadline_ns = None
        if self._round is None:
            return [EndJob(self._shortage), *self._leave_for_good(Exit(FAILED, self._shortage))]
        waited = f"{self._exit_barrier_ns / 1e9:g} s"
        text = f"the workers of this node have succeeded; waited {waited} for those of other nodes"
        if serves or self._round.group_rank == 0:
            return [AgentNotice(f"{text}, and go on waiting: they need the store that is here")]
        return [AgentNotice(text), LeaveJob(text), *self._leave_for_good(Exit(0, text))]

    def _describe(self, cause: WorkerFailed | NodesLost | NodesWaiting, round: Round) -> str:
        match cause:
            case WorkerFailed(failure):
                count = f"restart {round.restarts + 1} of {self._budget.restarts}"
                where = f" on {failure.host}" if len(round.nodes) > 1 else ""
                return f"{failure.message}{where}; starting all workers again ({count})"
            case NodesLost(_, reason):
                return f"{reason}; starting again without"
            case NodesWaiting(count):
                return f"{count} more node{'s' if count > 1 else ''} can take part; starting again with more"


def _is_same(one: Failure, other: Failure) -> bool:
    return (one.rank, one.pid, one.host) == (other.rank, other.pid, other.host)


def _exit_code(failure: Failure) -> int:
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code
