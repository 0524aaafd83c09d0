"""The rendezvous of a job that has one node: nobody to meet, no store, no thread."""

from __future__ import annotations

import os

from ronde.core.round import (
    AllSucceeded,
    Budget,
    Failure,
    JobClosed,
    Node,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
    WorkerFailed,
)
from ronde.records import replace

__all__ = ["AloneRendezvous"]


class AloneRendezvous:
    """A `Rendezvous` with this node only."""

    def __init__(self) -> None:
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: list[RendezvousEvent] = []
        self._budget = Budget()
        self._round: Round | None = None

    def fileno(self) -> int:
        return self._ready

    def events(self) -> list[RendezvousEvent]:
        if self._events:
            os.eventfd_read(self._ready)
        happened, self._events = self._events, []
        return happened

    def join(self, node: Node, budget: Budget) -> None:
        self._budget = budget
        last = self._round
        if last is None:
            self._round = Round(0, (node,), 0)
        else:
            self._round = replace(last, number=last.number + 1, nodes=(node,))
        self._tell(RoundBegan(self._round))

    def fail(self, failure: Failure) -> None:
        assert self._round is not None
        if self._round.restarts >= self._budget.restarts:
            self._tell(JobClosed(failure.message, failure))
            return
        ended = self._round
        self._round = replace(ended, restarts=ended.restarts + 1)
        self._tell(RoundEnded(ended.number, WorkerFailed(failure)))

    def succeed(self) -> None:
        assert self._round is not None
        self._tell(AllSucceeded(self._round.number))

    def end_job(self, reason: str) -> None:
        self._tell(JobClosed(reason))

    def leave(self, reason: str) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def close(self) -> None:
        os.close(self._ready)

    def _tell(self, event: RendezvousEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._ready, 1)
