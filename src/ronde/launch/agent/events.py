"""The events that an agent handles besides those of the rendezvous, and the effects that its shell performs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ronde.rendezvous.membership import Failure, RendezvousEvent, Round

__all__ = [
    "AgentNotice",
    "AgentTimer",
    "Effect",
    "EndJob",
    "Event",
    "Exit",
    "Failing",
    "InterruptAgent",
    "JoinRound",
    "LeaveJob",
    "ReportFailure",
    "ReportSuccess",
    "SetAgentTimer",
    "StartWorkers",
    "StopWorkers",
    "WorkersGone",
]


@dataclass(frozen=True)
class Failing:
    """A worker has failed without blaming a peer. The supervisor ends the others, and some may still run."""

    failure: Failure


@dataclass(frozen=True)
class WorkersGone:
    """All processes of the workers have ended.

    `exit_code` is 0 if all of them succeeded; `failure` is the first one, None if there was none.
    """

    exit_code: int
    reason: str
    failure: Failure | None = None


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


Event = RendezvousEvent | Failing | WorkersGone | InterruptAgent | AgentTimer


@dataclass(frozen=True)
class JoinRound:
    """Ask for the next round."""


@dataclass(frozen=True)
class StartWorkers:
    """Start the workers of the round; `again`: whether the job restarts them if one fails."""

    round: Round
    again: bool


@dataclass(frozen=True)
class StopWorkers:
    """End the workers, then send `WorkersGone`. `at_once`: leave them no time to save anything (rule 9 of `agent`)."""

    reason: str
    at_once: bool = False


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
class Exit:
    """End the agent.

    `failure` is the job's first failure, on any node, and None if the job ended for another reason. `gave_way`: the job
    may continue without this node. `is_closed`: the job was closed for all nodes, for another reason than a failure.
    `is_surplus`: the job has completed, and was full when this node came.
    """

    code: int
    reason: str
    failure: Failure | None = None
    gave_way: bool = False
    is_closed: bool = False
    is_surplus: bool = False


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
