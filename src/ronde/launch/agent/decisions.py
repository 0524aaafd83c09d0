"""What the agent of one node decides, from its first join to its exit. Pure.

An agent joins the rendezvous, runs the workers of its node while a round lasts, and reports how they ended. The
rendezvous decides on rounds and their members, and `worker_group` on what happens within one run of the workers. The
agent's events and effects come first.

The agent is in one state, and each state carries its data. `TRANSITIONS` says which method handles an event in which
state; an event without an entry has no effect. These are all changes of state (a test compares them with the machine):

    Joining                             -- RoundBegan -->    Healthy
    Healthy                             -- Failing -->       Unhealthy
    Healthy                             -- WorkersEnded -->  Succeeded, AwaitingVerdict
    Unhealthy, Succeeded                -- WorkersEnded -->  AwaitingVerdict     rule 10
    Healthy, Unhealthy                  -- RoundEnded -->    Stopping
    Healthy, Unhealthy                  -- Ejected -->       Stopping
    Stopping, Rejoining                 -- WorkersEnded -->  Joining
    Stopping                            -- WorkersSettled --> Rejoining          rule 11
    Rejoining                           -- RoundBegan -->    Healthy
    Rejoining                           -- Ejected -->       Stopping
    Succeeded, AwaitingVerdict          -- RoundEnded -->    Joining
    Succeeded, AwaitingVerdict          -- Ejected -->       Joining

    Succeeded                           -- AllSucceeded -->  Ended
    Succeeded, Joining                  -- AgentTimer -->    Ended       rules 4 and 5
    AwaitingVerdict                     -- Ejected -->       Ended       rule 7
    Joining, Succeeded, AwaitingVerdict -- JobClosed, RendezvousBroken, InterruptAgent -->  Ended

    Stopping, Rejoining                 -- AgentTimer -->    Exiting     rule 5
    Unhealthy                           -- Ejected -->       Exiting     rule 7
    Healthy, Unhealthy, Stopping, Rejoining -- JobClosed, RendezvousBroken, InterruptAgent -->  Exiting
    Exiting                             -- WorkersEnded -->  Ended

Rules

1. Workers run only within a round, and one run of them at a time: before it joins again, an agent waits until all
   processes of the last run have ended, but for those of workers that continue (rule 11).
2. The first worker that fails without blaming a peer ends the round for all nodes. The agent reports it at once
   (`ReportFailure`), while its other workers still end. The rendezvous answers whether the job continues.
3. A worker that fails because it lost a peer is not the cause as long as another worker of this node may be, so the
   agent reports such a failure when all workers have ended. The rendezvous finds out whether the cause is elsewhere.
4. When all its workers have succeeded, the agent waits for the other nodes (the exit barrier), because they may still
   need its store, or may fail and make it start again. It leaves when the barrier's time is up, and has succeeded. It
   stays while others need a store that it serves: that of the round (group rank 0), or that of the rendezvous.
5. When a round ends or continues without this node, the agent ends its workers and joins again. Where no other nodes
   can come (Slurm starts no task again, and -H no agent of a fixed list) and too few are left, the agent ends the job,
   unless a lost node, which may only have been cut off, is back in time.
6. Ctrl-C and Ctrl-\\ end the job on all nodes. Other signals take this node away; the others continue if they may.
7. Where nodes can be replaced (`gives_way`), the first failure of a round when no restart is left costs the job its
   node, and not its life: the others continue if they may. The rendezvous ejects that node, because a later failure may
   be only a consequence. The launcher that placed the nodes handles the rest.
8. Every ending has one reason, and the agent decides nothing after it.
9. The agent kills its workers at once if the others take this node for dead. They start theirs when the lease of this
   node has run out (`rendezvous/liveness`), and a late checkpoint of the old workers might replace one of the new
   workers. The others wait for the workers of a node that leaves, so these have time to save. When the lease runs out,
   workers that continue may leave their world instead (`Policy.leave_ns`): outside of all worlds they do nothing that
   counts. If another round begins before the next one of this node, the state of the job may not be theirs any more.
10. A worker that has ended with exit code 0 has failed if a rank of another node then waits for it in `ronde.init`
    (`worker_group`). If it was the last one of its node, the agent learns of the end of its workers a second time.
11. Workers that continue (`process/membership_channel`) outlive the end of a round: the agent tells them at once that
    it is lost, or that another one is wanted, joins the next round while they run, and begins that with them. It ends
    them where it would end any worker for another reason than the end of a round. If all workers have left the world of
    a round that has not ended, the agent asks for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from ronde.launch.agent.worker_group import TYPED
from ronde.rendezvous.membership import (
    HOW_TO_RESUME,
    AllSucceeded,
    Budget,
    ChangeRequested,
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

__all__ = [
    "FAILED",
    "TRANSITIONS",
    "UNREACHABLE",
    "Agent",
    "AgentNotice",
    "AgentTimer",
    "Effect",
    "EndJob",
    "Event",
    "AgentEnd",
    "Failing",
    "InterruptAgent",
    "JoinRound",
    "LeaveJob",
    "ReportFailure",
    "ReportSuccess",
    "SetAgentTimer",
    "StartWorkers",
    "StopWorkers",
    "WorkerState",
    "WorkersEnded",
    "WorldLeft",
    "WorkersSettled",
    "WorkersContinue",
    "RequestChange",
    "NotifyWorkers",
    "UpdateNode",
    "EndContinuing",
]


# Events, besides those of the rendezvous


@dataclass(frozen=True)
class Failing:
    """A worker has failed without blaming a peer. The agent ends the others, and some may still run."""

    failure: Failure


@dataclass(frozen=True)
class WorkersEnded:
    """All processes of the workers have ended.

    `exit_code` is 0 if all of them succeeded, or one failed after the training only (`GroupEnd.is_late`); `failure` is
    the first one, None if there was none.
    """

    exit_code: int
    reason: str
    failure: Failure | None = None


@dataclass(frozen=True)
class WorkersContinue:
    """The number of workers that would outlive the end of the round now."""

    count: int


@dataclass(frozen=True)
class WorkersSettled:
    """After `StopWorkers` with `keeps`: only processes of workers that continue are left."""


@dataclass(frozen=True)
class WorldLeft:
    """All workers of this node have left the world of the round, and wait for another one; `reason`: why."""

    number: int
    reason: str


@dataclass(frozen=True)
class InterruptAgent:
    """The agent got a signal that asks it to end. The shell has passed it on to the workers, if there are any."""

    signum: int
    reason: str


@dataclass(frozen=True)
class AgentTimer:
    """The time of the last `SetAgentTimer` has come; an early `AgentTimer` does no harm.

    `serves`: whether the nodes meet at a store that ends with this node.
    """

    serves: bool = False


Event = (
    RendezvousEvent
    | Failing
    | WorkersContinue
    | WorkersSettled
    | WorldLeft
    | WorkersEnded
    | InterruptAgent
    | AgentTimer
)


# Effects


@dataclass(frozen=True)
class JoinRound:
    """Ask for the next round; `is_outside`: workers run, but none is in a world (rule 9)."""

    is_outside: bool = False


@dataclass(frozen=True)
class UpdateNode:
    """Tell the rendezvous, which this node has asked for the next round, that its workers have ended."""


@dataclass(frozen=True)
class StartWorkers:
    """Start the workers of the round; `again`: whether the job restarts them if one fails.

    Those that continue get their place in it. `cause`: why the last round ended, and `lost`: the members that it lost;
    both empty unless workers continue. `keeps`: otherwise they are killed first (rule 9).
    """

    round: Round
    again: bool
    cause: str = ""
    lost: tuple[str, ...] = ()
    keeps: bool = True


@dataclass(frozen=True)
class StopWorkers:
    """End the workers, then send `WorkersEnded`. `at_once`: leave them no time to save anything (rule 9 of `agent`).

    `keeps`: end only those that do not continue, then send `WorkersSettled` if there are others; with `at_once` these
    must have left their world by then.
    """

    reason: str
    at_once: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class EndContinuing:
    """End the workers if some of them continue, because no round follows; the others are ending already."""

    reason: str


@dataclass(frozen=True)
class NotifyWorkers:
    """Tell those workers that continue that this round is lost, or (not `is_lost`) that another one is wanted."""

    number: int
    reason: str
    is_lost: bool = True


@dataclass(frozen=True)
class RequestChange:
    """Ask the rendezvous to end the round, whose workers have left their world."""

    reason: str


@dataclass(frozen=True)
class ReportFailure:
    """Report to the rendezvous that a worker of this round has failed."""

    failure: Failure


@dataclass(frozen=True)
class ReportSuccess:
    """Report to the rendezvous that all workers of this node have succeeded."""


@dataclass(frozen=True)
class EndJob:
    """Close the job for all nodes."""

    reason: str


@dataclass(frozen=True)
class LeaveJob:
    """Tell the rendezvous that this node leaves."""

    reason: str


@dataclass(frozen=True)
class AgentNotice:
    """Show the user this text."""

    text: str


@dataclass(frozen=True)
class SetAgentTimer:
    """Send `AgentTimer` at this time; it replaces any earlier one."""

    at_ns: int


@dataclass(frozen=True)
class AgentEnd:
    """End the agent.

    `failure` is the job's first failure, on any node, and None if the job ended for another reason. `gave_way`: the job
    may continue without this node. `is_closed`: the job was closed for all nodes, for another reason than a failure.
    `is_surplus`: the job has completed, and was full when this node came.
    """

    exit_code: int
    reason: str
    failure: Failure | None = None
    gave_way: bool = False
    is_closed: bool = False
    is_surplus: bool = False


Effect = (
    JoinRound
    | UpdateNode
    | StartWorkers
    | StopWorkers
    | EndContinuing
    | NotifyWorkers
    | RequestChange
    | ReportFailure
    | ReportSuccess
    | EndJob
    | LeaveJob
    | AgentNotice
    | SetAgentTimer
    | AgentEnd
)


FAILED, UNREACHABLE = 1, 2  # exit codes of endings that no worker caused


# States


class WorkerState(Enum):
    """The state of the workers of this node, in the words of torch's elastic agent."""

    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Shortage:
    """Too few nodes are left for another round, and no new ones can come: at `ends_ns` the agent ends the job."""

    reason: str
    ends_ns: int


@dataclass(frozen=True)
class EndedRound:
    """Why a round ended from which workers continue, and the members that it lost."""

    cause: str
    lost: tuple[str, ...]
    left: int | None = None  # the round whose world they have left because the lease has run out


@dataclass(frozen=True)
class Joining:
    """No workers; the agent has asked for the next round. `has_begun`: whether this node was in an earlier one."""

    workers: ClassVar = WorkerState.INIT
    has_begun: bool = False
    shortage: Shortage | None = None


@dataclass(frozen=True)
class Healthy:
    """The workers of the round run; `continuing`: how many of them continue."""

    workers: ClassVar = WorkerState.HEALTHY
    round: Round
    continuing: int = 0


@dataclass(frozen=True)
class Unhealthy:
    """A worker has failed, and the agent has reported it; the agent ends the other workers that do not continue."""

    workers: ClassVar = WorkerState.UNHEALTHY
    round: Round
    failure: Failure
    continuing: int = 0


@dataclass(frozen=True)
class AwaitingVerdict:
    """The workers have failed and ended; the rendezvous will answer whether the job continues.

    `failure` is the reported one; None if all workers ended without a failure, but not with exit code 0.
    """

    workers: ClassVar = WorkerState.FAILED
    round: Round
    failure: Failure | None


@dataclass(frozen=True)
class Succeeded:
    """All workers have succeeded; the agent waits for other nodes until `leaves_ns`; None: as long as they need it."""

    workers: ClassVar = WorkerState.SUCCEEDED
    round: Round
    leaves_ns: int | None


@dataclass(frozen=True)
class Stopping:
    """The agent ends the workers of a round that is over, or continues without this node, and then joins again."""

    workers: ClassVar = WorkerState.STOPPED
    shortage: Shortage | None = None
    ended: EndedRound | None = None


@dataclass(frozen=True)
class Rejoining:
    """The agent has asked for the next round, and only workers that continue run."""

    workers: ClassVar = WorkerState.HEALTHY
    shortage: Shortage | None
    ended: EndedRound


@dataclass(frozen=True)
class Exiting:
    """The agent ends its workers, or they end after a signal; then the agent exits.

    `exit`: None if the workers' exit code is to be the agent's. `round`: theirs, while it lasts. `has_signal`: whether
    the agent has passed on a signal to the rendezvous.
    """

    workers: ClassVar = WorkerState.STOPPED
    exit: AgentEnd | None
    round: Round | None = None
    has_signal: bool = False


@dataclass(frozen=True)
class Ended:
    """The agent has ended."""

    exit: AgentEnd

    @property
    def workers(self) -> WorkerState:
        return WorkerState.FAILED if self.exit.exit_code else WorkerState.SUCCEEDED


State = Joining | Healthy | Unhealthy | AwaitingVerdict | Succeeded | Stopping | Rejoining | Exiting | Ended
WithWorkers = Healthy | Unhealthy | Stopping | Rejoining | Exiting

KILL = StopWorkers("the others may have gone on", at_once=True)

Cause = WorkerFailed | NodesLost | NodesWaiting | ChangeRequested
Next = tuple[State, list[Effect]]  # the next state, and what the shell performs
_Handler = Callable[["Agent", int, Any, Any], Next]


class Agent:
    """The machine: one agent of a job, in any number of rounds.

    `exit_barrier_ns` is how long to wait for others. `gives_way`: rule 7. `supply`: the number of all nodes that can
    ever come, None if there is no limit; the job needs `least`, and waits `shortage_ns` for a lost one if it has fewer.
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
        self._exit_barrier_ns = exit_barrier_ns
        self._gives_way = gives_way
        self._supply = supply
        self._least = least
        self._shortage_ns = shortage_ns
        self._lost: set[str] = set()  # by id, nodes that have not come back
        self._state: State = Joining()

    @property
    def state(self) -> WorkerState:
        """The state of this node's workers."""
        return self._state.workers

    def begin(self) -> list[Effect]:
        """Return the first effects."""
        return [JoinRound()]

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return the effects of the event, which the shell learned of at `now_ns` of its monotonic clock."""
        handle = TRANSITIONS.get((type(self._state), type(event)))
        if handle is None:
            return []
        self._state, effects = handle(self, now_ns, self._state, event)
        return effects

    # Rounds

    def _begin_round(self, _: int, state: Joining | Rejoining, event: RoundBegan) -> Next:
        round = event.round
        self._lost -= {node.id for node in round.nodes}
        again = round.restarts < self._budget.restarts
        if isinstance(state, Rejoining):
            ended, keeps = state.ended, state.ended.left in (None, round.previous)
            return Healthy(round), [StartWorkers(round, again, ended.cause, ended.lost, keeps)]
        return Healthy(round), [StartWorkers(round, again)]

    def _end_round(
        self, now_ns: int, state: Healthy | Unhealthy | Succeeded | AwaitingVerdict, event: RoundEnded
    ) -> Next:
        round = state.round
        if round.number != event.number:
            return state, []
        shortage = self._find_shortage(now_ns, event.cause, round)
        if isinstance(state, Healthy | Unhealthy) and state.continuing:
            return self._end_round_in_place(state, event, shortage)
        notice = AgentNotice(self._describe(event.cause, round))
        timer = [SetAgentTimer(shortage.ends_ns)] if shortage else []
        if isinstance(state, WithWorkers):
            return Stopping(shortage), [notice, StopWorkers("the round is over"), *timer]
        return Joining(has_begun=True, shortage=shortage), [notice, JoinRound(), *timer]

    def _end_round_in_place(
        self, state: Healthy | Unhealthy, event: RoundEnded, shortage: Shortage | None
    ) -> Next:
        """End the round for workers of which some continue. The next round's beginning tells the user."""
        cause = self._cause_of(event.cause, state.round)
        is_lost = isinstance(event.cause, WorkerFailed | NodesLost)
        ended = EndedRound(cause, (cause,) if is_lost else ())
        timer = [SetAgentTimer(shortage.ends_ns)] if shortage else []
        tell = NotifyWorkers(event.number, cause, is_lost)
        return Stopping(shortage, ended), [tell, StopWorkers("the round is over", keeps=True), *timer]

    def _end_round_while_exiting(self, _: int, state: Exiting, event: RoundEnded) -> Next:
        if state.round is None or state.round.number != event.number:
            return state, []
        return replace(state, round=None), [AgentNotice(self._describe(event.cause, state.round))]

    def _find_shortage(self, now_ns: int, cause: Cause, round: Round) -> Shortage | None:
        """Return the shortage that follows from this loss; None if another round can begin."""
        if self._supply is None or not isinstance(cause, NodesLost):
            return None
        self._lost |= cause.ids(round.nodes)
        left = self._supply - len(self._lost)
        if left >= self._least:
            return None
        are = "is" if left == 1 else "are"
        reason = (
            f"{cause.reason}, and nobody starts it again: {left} of {self._supply} nodes {are} left, and the job needs "
            f"{self._least} (--nnodes MIN:MAX, or --min-np with -H, lets it go on with fewer). {HOW_TO_RESUME}"
        )
        return Shortage(reason, now_ns + self._shortage_ns)

    def _kill_workers(
        self, _: int, state: Healthy | Unhealthy | Stopping | Rejoining, event: Ejected
    ) -> Next:
        if event.is_unsure and isinstance(state, Healthy) and state.continuing:
            ended = EndedRound(event.reason, (event.reason,), state.round.number)
            tell = NotifyWorkers(state.round.number, event.reason)
            return Stopping(None, ended), [tell, StopWorkers(event.reason, at_once=True, keeps=True)]
        following = replace(state, ended=None) if isinstance(state, Stopping) else Stopping()
        return following, [AgentNotice(event.reason), KILL]

    def _kill_workers_and_exit(self, _: int, state: Exiting, event: Ejected) -> Next:
        return replace(state, round=None), [AgentNotice(event.reason), KILL]

    def _join_again(self, _: int, state: Joining | Succeeded | AwaitingVerdict, event: Ejected) -> Next:
        shortage = state.shortage if isinstance(state, Joining) else None
        return Joining(has_begun=True, shortage=shortage), [AgentNotice(event.reason), JoinRound()]

    def _give_way(self, now_ns: int, state: Unhealthy | AwaitingVerdict, event: Ejected) -> Next:
        if self._gives_way and (failure := state.failure):
            exit = AgentEnd(_exit_code(failure), failure.message, failure, gave_way=True)
            if isinstance(state, Unhealthy):
                return Exiting(exit, state.round), [LeaveJob(exit.reason)]
            return Ended(exit), [exit]
        if isinstance(state, Unhealthy):
            return self._kill_workers(now_ns, state, event)
        return self._join_again(now_ns, state, event)

    # Workers

    def _report_failure(self, _: int, state: Healthy, event: Failing) -> Next:
        effects: list[Effect] = [ReportFailure(event.failure)]
        if state.continuing:
            effects.insert(0, NotifyWorkers(state.round.number, event.failure.message))
        return Unhealthy(state.round, event.failure, state.continuing), effects

    def _note_continuing(self, _: int, state: Healthy | Unhealthy, event: WorkersContinue) -> Next:
        return replace(state, continuing=event.count), []

    def _rejoin(self, _: int, state: Stopping, event: WorkersSettled) -> Next:
        if state.ended is None:
            return state, []  # the workers are being killed
        return Rejoining(state.shortage, state.ended), [JoinRound(state.ended.left is not None)]

    def _request_change(self, _: int, state: Healthy, event: WorldLeft) -> Next:
        if event.number != state.round.number:
            return state, []
        return state, [RequestChange(event.reason)]

    def _judge_workers(self, now_ns: int, state: Healthy, event: WorkersEnded) -> Next:
        if event.exit_code == 0:
            leaves_ns = now_ns + self._exit_barrier_ns
            return Succeeded(state.round, leaves_ns), [ReportSuccess(), SetAgentTimer(leaves_ns)]
        report: list[Effect] = [ReportFailure(event.failure)] if event.failure else []
        return AwaitingVerdict(state.round, event.failure), report

    def _take_back_success(self, _: int, state: Succeeded, event: WorkersEnded) -> Next:
        if event.failure is None:
            return state, []
        return AwaitingVerdict(state.round, event.failure), [ReportFailure(event.failure)]

    def _await_verdict(self, _: int, state: Unhealthy, event: WorkersEnded) -> Next:
        return AwaitingVerdict(state.round, state.failure), []

    def _join_next_round(self, _: int, state: Stopping, event: WorkersEnded) -> Next:
        notice: list[Effect] = []
        if state.ended:  # those that were to continue have ended, too
            notice = [AgentNotice(f"{state.ended.cause}; starting all workers again")]
        return Joining(has_begun=True, shortage=state.shortage), [*notice, JoinRound()]

    def _lose_continuing(self, _: int, state: Rejoining, event: WorkersEnded) -> Next:
        notice = AgentNotice(f"{state.ended.cause}; {event.reason}; starting all workers again")
        return Joining(has_begun=True, shortage=state.shortage), [notice, UpdateNode()]

    def _finish_exit(self, _: int, state: Exiting, event: WorkersEnded) -> Next:
        exit = state.exit or AgentEnd(event.exit_code, event.reason, event.failure)
        if exit.failure and event.failure and _is_same(exit.failure, event.failure):
            # The first report told of the worker's exception; its exit code is known only now.
            exit = AgentEnd(event.exit_code, exit.reason, event.failure, exit.gave_way)
        return Ended(exit), [exit]

    # Endings

    def _exit(self, state: State, exit: AgentEnd, stop: bool = True) -> Next:
        """Exit, at once or when the workers have ended; without `stop` their end is already under way."""
        if not isinstance(state, WithWorkers):
            return Ended(exit), [exit]
        effects: list[Effect] = [StopWorkers(exit.reason)] if stop else []
        if isinstance(state, Exiting):
            return replace(state, exit=exit), effects
        return Exiting(exit, None if isinstance(state, Stopping | Rejoining) else state.round), effects

    def _succeed(self, _: int, state: Succeeded, event: AllSucceeded) -> Next:
        if event.number != state.round.number:
            return state, []
        return self._exit(state, AgentEnd(0, "all nodes have succeeded"))

    def _close(self, _: int, state: State, event: JobClosed) -> Next:
        code = 0 if event.completed else FAILED if event.failure is None else _exit_code(event.failure)
        is_closed = not (event.completed or event.failure)
        exit = AgentEnd(code, event.reason, event.failure, is_closed=is_closed, is_surplus=event.was_full)
        following, effects = self._exit(state, exit, stop=not isinstance(state, Unhealthy))
        if isinstance(state, Unhealthy) and state.continuing:
            effects = [EndContinuing(event.reason)]
        unneeded = f"{event.reason}; this node was not needed"
        if event.was_full:
            unneeded += ", since the job was full: start a job of its own with another id (--rdzv-id)"
        notice = [AgentNotice(unneeded)] if event.completed else []
        return following, [*notice, *effects]

    def _break(self, _: int, state: State, event: RendezvousBroken) -> Next:
        match state:
            case Succeeded():
                text = f"the workers of this node have succeeded; how the other nodes end is not known: {event.reason}"
                following, effects = self._exit(state, AgentEnd(0, text))
                return following, [AgentNotice(text), *effects]
            case Unhealthy(_, Failure() as failure, _) | AwaitingVerdict(_, Failure() as failure):
                return self._exit(state, AgentEnd(_exit_code(failure), event.reason, failure))
            case Joining(has_begun=False):
                return self._exit(state, AgentEnd(UNREACHABLE, event.reason))
            case _:
                return self._exit(state, AgentEnd(FAILED, event.reason))

    def _interrupt(self, _: int, state: Healthy | Unhealthy, event: InterruptAgent) -> Next:
        return Exiting(None, state.round, has_signal=True), [_pass_on(event)]

    def _interrupt_and_exit(self, _: int, state: State, event: InterruptAgent) -> Next:
        exit = AgentEnd(128 + event.signum, event.reason)
        if isinstance(state, Stopping | Rejoining):
            return Exiting(exit, has_signal=True), [_pass_on(event)]
        return Ended(exit), [_pass_on(event), exit]

    def _interrupt_exit(self, _: int, state: Exiting, event: InterruptAgent) -> Next:
        return replace(state, has_signal=True), [] if state.has_signal else [_pass_on(event)]

    def _end_short_job(self, now_ns: int, state: Joining | Stopping | Rejoining, event: AgentTimer) -> Next:
        shortage = state.shortage
        if shortage is None:
            return state, []
        if now_ns < shortage.ends_ns:
            return state, [SetAgentTimer(shortage.ends_ns)]
        following, effects = self._exit(state, AgentEnd(FAILED, shortage.reason))
        return following, [EndJob(shortage.reason), *effects]

    def _leave_barrier(self, now_ns: int, state: Succeeded, event: AgentTimer) -> Next:
        if state.leaves_ns is None:
            return state, []
        if now_ns < state.leaves_ns:
            return state, [SetAgentTimer(state.leaves_ns)]
        waited = f"{self._exit_barrier_ns / 1e9:g} s"
        text = f"the workers of this node have succeeded; waited {waited} for those of other nodes"
        if event.serves or state.round.group_rank == 0:
            notice = AgentNotice(f"{text}, and go on waiting: they need the store that is here")
            return Succeeded(state.round, leaves_ns=None), [notice]
        following, effects = self._exit(state, AgentEnd(0, text))
        return following, [AgentNotice(text), LeaveJob(text), *effects]

    # Notices

    def _show(self, _: int, state: State, event: Notice) -> Next:
        return state, [AgentNotice(event.text)]

    def _describe(self, cause: Cause, round: Round) -> str:
        what = self._cause_of(cause, round)
        match cause:
            case WorkerFailed():
                count = f"restart {round.restarts + 1} of {self._budget.restarts}"
                return f"{what}; starting all workers again ({count})"
            case NodesLost():
                return f"{what}; starting again without"
            case NodesWaiting():
                return f"{what}; starting again with more"
            case ChangeRequested():
                return f"{what}; starting all workers again"

    def _cause_of(self, cause: Cause, round: Round) -> str:
        match cause:
            case WorkerFailed(failure):
                where = f" on {failure.host}" if len(round.nodes) > 1 else ""
                return f"{failure.message}{where}"
            case NodesLost(_, reason) | ChangeRequested(reason):
                return reason
            case NodesWaiting(count):
                return f"{count} more node{'s' if count > 1 else ''} can take part"


_UNDECIDED = (Joining, Healthy, Unhealthy, Stopping, Rejoining, Succeeded, AwaitingVerdict)
# An event, its handler, and the states in which the event has an effect.
_HANDLERS: tuple[tuple[type[Event], _Handler, tuple[type[State], ...]], ...] = (
    (RoundBegan, Agent._begin_round, (Joining, Rejoining)),
    (RoundEnded, Agent._end_round, (Healthy, Unhealthy, Succeeded, AwaitingVerdict)),
    (RoundEnded, Agent._end_round_while_exiting, (Exiting,)),
    (Ejected, Agent._join_again, (Joining, Succeeded)),
    (Ejected, Agent._kill_workers, (Healthy, Stopping, Rejoining)),
    (Ejected, Agent._give_way, (Unhealthy, AwaitingVerdict)),
    (Ejected, Agent._kill_workers_and_exit, (Exiting,)),
    (Failing, Agent._report_failure, (Healthy,)),
    (WorkersContinue, Agent._note_continuing, (Healthy, Unhealthy)),
    (WorkersSettled, Agent._rejoin, (Stopping,)),
    (WorldLeft, Agent._request_change, (Healthy,)),
    (WorkersEnded, Agent._judge_workers, (Healthy,)),
    (WorkersEnded, Agent._take_back_success, (Succeeded,)),
    (WorkersEnded, Agent._await_verdict, (Unhealthy,)),
    (WorkersEnded, Agent._join_next_round, (Stopping,)),
    (WorkersEnded, Agent._lose_continuing, (Rejoining,)),
    (WorkersEnded, Agent._finish_exit, (Exiting,)),
    (AllSucceeded, Agent._succeed, (Succeeded,)),
    (JobClosed, Agent._close, _UNDECIDED),
    (RendezvousBroken, Agent._break, _UNDECIDED),
    (InterruptAgent, Agent._interrupt, (Healthy, Unhealthy)),
    (InterruptAgent, Agent._interrupt_and_exit, (Joining, Stopping, Rejoining, Succeeded, AwaitingVerdict)),
    (InterruptAgent, Agent._interrupt_exit, (Exiting,)),
    (AgentTimer, Agent._end_short_job, (Joining, Stopping, Rejoining)),
    (AgentTimer, Agent._leave_barrier, (Succeeded,)),
    (Notice, Agent._show, (*_UNDECIDED, Exiting)),
)
TRANSITIONS = {(state, event): handler for event, handler, states in _HANDLERS for state in states}


def _pass_on(event: InterruptAgent) -> EndJob | LeaveJob:
    return EndJob(event.reason) if event.signum in TYPED else LeaveJob(event.reason)


def _is_same(one: Failure, other: Failure) -> bool:
    return (one.rank, one.pid, one.host) == (other.rank, other.pid, other.host)


def _exit_code(failure: Failure) -> int:
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code
