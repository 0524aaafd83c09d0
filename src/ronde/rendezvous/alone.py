"""The rendezvous of a job with one node: the rules of a round without other nodes.

It has no store, thread or clock, and needs none of the machines of several nodes.
"""

from __future__ import annotations

from dataclasses import replace

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net.event_queue import EventQueue
from ronde.rendezvous.membership import (
    AllSucceeded,
    Budget,
    ChangeRequested,
    Failure,
    JobClosed,
    Node,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
    WorkerFailed,
)
from ronde.rendezvous.rendezvous import Rendezvous, RendezvousConfig

__all__ = ["Alone", "make"]


class Alone:
    """The `Rendezvous` of a job with one node. Raises UsageError if the config asks for more."""

    def __init__(self, config: RendezvousConfig) -> None:
        if config.min_nodes != 1 or config.max_nodes != 1:
            least, most = config.min_nodes, config.max_nodes
            wanted = f"{most}" if least == most else f"{least} to {most}"
            raise UsageError(
                f"the rendezvous 'alone' is for one node, not {wanted}: choose another by --rdzv-backend"
            )
        self._happened: EventQueue[RendezvousEvent] = EventQueue()
        self._budget = Budget()
        self._round: Round | None = None  # the last one, with its counts of restarts and changes
        self._running = False
        self._over = False

    def fileno(self) -> int:
        return self._happened.fileno()

    def events(self) -> list[RendezvousEvent]:
        return self._happened.take()

    def join(self, node: Node, budget: Budget) -> None:
        if self._over:
            return
        self._budget, self._running = budget, True
        last = self._round
        self._round = (
            replace(last, number=last.number + 1, nodes=(node,))
            if last
            else Round(0, (node,), 0, job=node.id)
        )
        self._happened.put(RoundBegan(self._round))

    def fail(self, failure: Failure) -> None:
        ended = self._round
        if not self._running or ended is None:
            return
        if ended.restarts >= self._budget.restarts:
            self._close(JobClosed(failure.message, failure))
            return
        self._running = False
        self._round = replace(ended, restarts=ended.restarts + 1)
        self._happened.put(RoundEnded(ended.number, WorkerFailed(failure)))

    def request_change(self, reason: str) -> None:
        if self._running and self._round:
            self._running = False
            self._happened.put(RoundEnded(self._round.number, ChangeRequested(reason)))

    def succeed(self) -> None:
        if self._running and self._round:
            self._close(AllSucceeded(self._round.number))

    def note_awaited_exit(self, awaits_exit: bool) -> None:
        pass  # the node itself waits

    def end_job(self, reason: str) -> None:
        if not self._over:
            self._close(JobClosed(reason))

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        self._over, self._running = True, False

    def serves_others(self) -> bool:
        return False

    def close(self) -> None:
        self._happened.close()

    def _close(self, last: AllSucceeded | JobClosed) -> None:
        self._over, self._running = True, False
        self._happened.put(last)


def make(config: RendezvousConfig, _: JobKey) -> Rendezvous:
    """Return an `Alone`; it needs no key."""
    return Alone(config)
