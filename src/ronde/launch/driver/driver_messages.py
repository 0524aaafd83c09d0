"""What a driver, the agents that it starts, and the tasks of a cluster say to each other.

A driver starts `ronde.launch.driver.agent_main` on a host. The agent says hello, and then reads one line, its
`Assignment`, from standard input, which stays open until the driver no longer needs the agent. It leaves the job's end
as it saw it, a `JobEnd`, in the job's store.

A message between a driver and a task of a cluster is one letter and its data. The task registers, the driver accepts or
refuses it, and then the streams of the task's agent pass, in both directions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ronde.errors import ProtocolError, UsageError
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.ring import RingPlan
from ronde.net.authentication import PROTOCOL_VERSION
from ronde.rendezvous.membership import Failure
from ronde.typed_json import TypedJson

__all__ = [
    "AGENT_END_NS",
    "Assignment",
    "DaemonOrder",
    "HEARTBEATS",
    "HELLO",
    "JOB_END",
    "JobEnd",
    "KEY_LINE",
    "PURPOSE",
    "REGISTRATION",
    "Registration",
    "TaskMessage",
    "agent_command",
    "ended_key",
    "hello",
    "split_message",
]

HELLO = b"ronde agent "
KEY_LINE = b"key "  # before the assignment, from a task that has the job's key
DAEMON_LINE = b"mpi "
PURPOSE = "task of a cluster"
HEARTBEATS = 4  # how many fit into the longest silence
AGENT_END_NS = 15 * 10**9  # how long an agent may take to end after its workers


@dataclass(frozen=True)
class Assignment:
    """The assignment that an agent gets after its hello.

    `agent`: its name. `job_key`: empty if the task that started the agent gives it the key. `stores`: the addresses at
    which the job's store may be reached, the likely ones first. `directory`: in which to work; empty: where the agent
    starts. `environment`: variables that override the host's. `has_call`: the workers call the function in the store
    (`job_store`) instead of the command in `config`. `ring`: the agent's part in finding out by which address other
    hosts reach its own; None: it takes the one that leads to the store.
    """

    agent: str
    job_key: str = field(repr=False)
    stores: tuple[str, ...]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    has_call: bool
    ring: RingPlan | None
    config: LaunchConfig

    def encode(self) -> bytes:
        """Return the assignment as one line."""
        return _ASSIGNMENT.encode(self) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Assignment:
        """Return the assignment in a line of `encode`. Raises UsageError, without the line, which has the job key."""
        try:
            return _ASSIGNMENT.decode(line)
        except ProtocolError:
            raise UsageError(
                "an agent is started by `ronde run -H`, which tells it what to do, with the same version of Ronde"
            ) from None


@dataclass(frozen=True)
class DaemonOrder:
    """What an agent gets instead of an assignment if it is to run a daemon of MPI (`launch/mpi`).

    `command`: for the shell. `environment`: variables for the daemon and its ranks, which override the host's. The rest
    is for the ticket of the ranks.
    """

    command: str
    environment: Mapping[str, str]
    addresses: tuple[str, ...]
    start_timeout_ns: int

    def encode(self) -> bytes:
        """Return the order as one line."""
        return DAEMON_LINE + _ORDER.encode(self) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> DaemonOrder | None:
        """Return the order in a line of `encode`, None for any other line."""
        return _ORDER.decode(line.removeprefix(DAEMON_LINE)) if line.startswith(DAEMON_LINE) else None


@dataclass(frozen=True)
class JobEnd:
    """How a job ended: for an agent, which leaves this in the job's store, and for its driver.

    `failure`: the job's first one. `gave_way`: the job may go on without the agent's node.
    """

    exit_code: int
    reason: str
    failure: Failure | None = None
    gave_way: bool = False


class TaskMessage(Enum):
    """The first byte of a message."""

    # From the task
    REGISTER = b"R"
    STDOUT = b"O"
    STDERR = b"E"
    EXIT = b"X"  # the exit code, in decimal; the last message
    # From the driver
    ACCEPT = b"A"  # start the agent
    REFUSE = b"N"  # with the reason
    STDIN = b"I"
    END_OF_STDIN = b"C"
    KILL = b"K"
    # From both
    HEARTBEAT = b"H"


def split_message(message: bytes) -> tuple[TaskMessage, bytes]:
    """Return the kind of a message and the rest. Raises ProtocolError if there is no such kind."""
    try:
        return TaskMessage(message[:1]), message[1:]
    except ValueError:
        raise ProtocolError(f"a message begins with {message[:1]!r}, which has no meaning") from None


@dataclass(frozen=True)
class Registration:
    """A task's description of itself. `host_id`: equal for tasks on one host (`net/host`); `gpus`: those it may use."""

    slot: int
    attempt: int
    host: str
    host_id: str
    gpus: tuple[str, ...] = ()


_ASSIGNMENT: TypedJson[Assignment] = TypedJson(Assignment, "assignment of an agent")
_ORDER: TypedJson[DaemonOrder] = TypedJson(DaemonOrder, "order of a daemon")
JOB_END: TypedJson[JobEnd] = TypedJson(JobEnd, "end of a job")
REGISTRATION: TypedJson[Registration] = TypedJson(Registration, "registration of a task")


@functools.cache
def hello() -> bytes:
    """Return an agent's greeting, with its version of Ronde."""
    from importlib.metadata import (  # here, because tasks, which load this module, send none
        PackageNotFoundError,
        version,
    )

    try:
        installed = version("ronde")
    except PackageNotFoundError:
        installed = "unknown"
    return HELLO + f"{installed} protocol {PROTOCOL_VERSION}\n".encode()


def ended_key(agent: str) -> str:
    """Return the key of an agent's `JobEnd` in the job's store."""
    return f"agents/{agent}/ended"


def agent_command() -> list[str]:
    """Return the command that starts an agent on this machine.

    -P keeps the directory in which it starts out of its module path.
    """
    return [sys.executable, "-P", "-m", "ronde.launch.driver.agent_main"]
