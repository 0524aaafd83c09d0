"""The interface of a rendezvous for the agent of a node."""

from __future__ import annotations

from typing import Protocol

from ronde.core.rendezvous.membership import Budget, Failure, Node, RendezvousEvent

__all__ = ["Rendezvous"]


class Rendezvous(Protocol):
    """One node's part in the rendezvous of its job.

    All methods return at once and may be called from one thread only; what comes of them is an event. `join` first;
    after `RoundBegan`, `fail` or `succeed` once at most; after `RoundEnded` or `Ejected`, `join` again; `close` last.
    While workers run, `RoundEnded`, `Ejected`, `JobClosed` and `RendezvousBroken` may come at any time: end them then.
    The last two, and `AllSucceeded`, are the last event; but after `RendezvousBroken` an `Ejected` may say that workers
    which are still ending must be killed now.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""

    def events(self) -> list[RendezvousEvent]:
        """Return what has happened since the last call."""

    def join(self, node: Node, budget: Budget) -> None:
        """Ask to take part in the next round: comes to `RoundBegan`, `JobClosed` or `RendezvousBroken`."""

    def fail(self, failure: Failure) -> None:
        """End this round for all nodes: a worker of this one has failed."""

    def succeed(self) -> None:
        """Say that all workers of this node have succeeded: comes to `AllSucceeded`, or the round ends otherwise."""

    def end_job(self, reason: str) -> None:
        """Close the job for all nodes, present and future: the user has interrupted it."""

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        """Go away in good order; the others go on without this node if they may.

        Its workers end within that time, and then comes `close`; the others start theirs when that has happened.
        """

    def serves_others(self) -> bool:
        """Return whether the nodes meet at a store that ends with this process."""

    def close(self) -> None:
        """Let go of everything, at the latest after a few seconds. Without `leave` before it, the others see a loss."""
