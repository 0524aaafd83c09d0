"""The rendezvous of one node with itself: the same machines, without a store, a thread or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ronde.core.rendezvous import Participant
from ronde.core.rendezvous_effects import (
    Compare,
    Compared,
    Effect,
    Event,
    Forget,
    Hold,
    Look,
    Pop,
    Popped,
    Push,
    Seen,
    Set,
    Stored,
    Tell,
    Watch,
)
from ronde.core.rendezvous_state import STATE
from ronde.core.round import Budget, Failure, Node, RendezvousEvent
from ronde.errors import UsageError
from ronde.net.rendezvous.base import Rendezvous
from ronde.net.rendezvous.config import RendezvousConfig
from ronde.net.rendezvous.events import Events
from ronde.settings import JobKey

__all__ = ["Alone", "make"]


class Alone:
    """The `Rendezvous` of a job that has one node. Raises UsageError if it may have more, or needs more."""

    def __init__(self, config: RendezvousConfig) -> None:
        if config.min_nodes != 1 or config.max_nodes != 1:
            wanted = f"{config.min_nodes} to {config.max_nodes}"
            raise UsageError(
                f"the rendezvous 'alone' is for one node, not {wanted}: choose another by --rdzv-backend"
            )
        self._participant = Participant(config.rules())
        self._events = Events()
        self._values: dict[str, bytes] = {}
        self._queue = ""  # from which messages are taken

    def fileno(self) -> int:
        return self._events.fileno()

    def events(self) -> list[RendezvousEvent]:
        return self._events.take()

    def join(self, node: Node, budget: Budget) -> None:
        self._do(lambda: self._participant.join(0, replace(node, wish=-1), budget))

    def fail(self, failure: Failure) -> None:
        self._do(lambda: self._participant.fail(failure))

    def succeed(self) -> None:
        self._do(lambda: self._participant.succeed(0))

    def end_job(self, reason: str) -> None:
        self._do(lambda: self._participant.end_job(reason))

    def leave(self, reason: str) -> None:
        self._do(lambda: self._participant.leave(reason))

    def num_nodes_waiting(self) -> int:
        return 0

    def close(self) -> None:
        self._events.close()

    def _do(self, ask: Callable[[], list[Effect]]) -> None:
        """Do what the machine wants, and what comes of that, until nothing is left."""
        effects = deque(ask())
        pushed: deque[bytes] = deque()
        while effects or pushed:
            if not effects:
                effects += self._participant.step(0, Popped(self._queue, (pushed.popleft(),)))
            elif (event := self._perform(effects.popleft(), pushed)) is not None:
                effects += self._participant.step(0, event)

    def _perform(self, effect: Effect, pushed: deque[bytes]) -> Event | None:
        match effect:
            case Tell(event):
                self._events.put(event)
            case Set(values):
                self._values |= values
                return Stored()
            case Push(_, value):
                pushed.append(value)
            case Pop(queue):
                self._queue = queue or ""
            case Compare(expected, desired):
                if self._values.get(STATE, b"") == expected:
                    self._values[STATE] = desired
                return Compared(self._values[STATE])
            case Look(known):
                found = {key: self._values.get(key) for key in known}
                return Seen(known, {key: value for key, value in found.items() if value != known[key]})
            case Forget(prefix):
                for key in [key for key in self._values if key.startswith(prefix)]:
                    del self._values[key]
            case Hold() | Watch():
                pass  # nobody else is there
        return None


def make(config: RendezvousConfig, _: JobKey) -> Rendezvous:
    """Return an `Alone`; it needs no key."""
    return Alone(config)
