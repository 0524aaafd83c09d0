"""The assignment of an agent that a driver starts, and the other messages of driver and agent.

A driver starts `ronde.launch.driver.agent_main` on a host. This says hello and then reads one line, its `Assignment`,
from standard input, which stays open until the driver no longer needs the agent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.errors import ProtocolError, UsageError
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.ring import RingPlan
from ronde.net.authentication import PROTOCOL_VERSION
from ronde.rendezvous.membership import Failure
from ronde.typed_json import TypedJson

__all__ = [
    "HELLO",
    "KEY_LINE",
    "LAST_WORD",
    "Assignment",
    "DaemonOrder",
    "LastWord",
    "agent_command",
    "ended_key",
    "hello",
]

HELLO = b"ronde agent "
KEY_LINE = b"key "  # before the assignment, from a task that has the job's key
DAEMON_LINE = b"mpi "


@dataclass(frozen=True)
class Assignment:
    """The assignment that an agent gets after its hello.

    `agent`: its name. `job_key`: empty if the task that started the agent gives it the key. `stores`: the addresses at
    which the job's store may be reached, the likely ones first. `directory`: in which to work; empty: where the agent
    starts. `environment`: variables that override the host's. `has_call`: the workers call the function in the store
    (`transfer`) instead of the command in `config`. `ring`: the agent's part in finding out by which address other
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
class LastWord:
    """How the job ended, as an agent leaves it in the job's store.

    `failure`: the job's first one; `gave_way`: the job may go on without the agent's node.
    """

    exit_code: int
    reason: str
    failure: Failure | None
    gave_way: bool


_ASSIGNMENT: TypedJson[Assignment] = TypedJson(Assignment, "assignment of an agent")
_ORDER: TypedJson[DaemonOrder] = TypedJson(DaemonOrder, "order of a daemon")
LAST_WORD: TypedJson[LastWord] = TypedJson(LastWord, "last word of an agent")


def hello() -> bytes:
    """Return an agent's greeting, with its version of Ronde."""
    return HELLO + f"{_version()} protocol {PROTOCOL_VERSION}\n".encode()


def _version() -> str:
    """Return the installed version, from the name of a folder: `importlib.metadata` takes 20 ms to load."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except OSError:
            continue
        for name in names:
            if name.startswith("ronde-") and name.endswith(".dist-info"):
                return name[len("ronde-") : -len(".dist-info")]
    return "unknown"


def ended_key(agent: str) -> str:
    """Return the key of an agent's last word in the job's store."""
    return f"agents/{agent}/ended"


def agent_command() -> list[str]:
    """Return the command that starts an agent on this machine.

    -P keeps the directory in which it starts out of its module path.
    """
    return [sys.executable, "-P", "-m", "ronde.launch.driver.agent_main"]
