"""What a driver and a task of a cluster say to each other: one letter, and the rest of the message.

The task registers, the driver accepts or refuses it, and then the streams of the task's agent pass, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ronde.errors import ProtocolError
from ronde.typed_json import TypedJson

__all__ = ["HEARTBEATS", "PURPOSE", "REGISTRATION", "Registration", "TaskMessage", "split_message"]

PURPOSE = "task of a cluster"
HEARTBEATS = 4  # how many fit into the longest silence


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


REGISTRATION: TypedJson[Registration] = TypedJson(Registration, "registration of a task")
