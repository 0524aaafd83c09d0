"""The interface of a rendezvous for the agent of a node."""

from __future__ import annotations

from typing import Protocol

from ronde.core.rendezvous.membership import Budget, Failure, Node, RendezvousEvent

__all__ = ["Rendezvous"]


class Rendezvous(Protocol):
    """One node's part in the rendezvous of its job.

    All methods return at once, and answer by events; call them from one thread. Call `join` first; after `RoundBegan`,
    `fail` or `succeed`, once at most; after `RoundEnded` or `Ejected`, `join` again; `close` last. While workers run,
    `RoundEnded`, `Ejected`, `JobClosed` or `RendezvousBroken` may arrive at any time: end the workers then.
    `JobClosed`, `RendezvousBroken` and `AllSucceeded` are last events, except that an `Ejected` after
    `RendezvousBroken` asks to kill workers that are still ending.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events."""

    def events(self) -> list[RendezvousEvent]:
        """Return the events since the last call."""

    def join(self, node: Node, budget: Budget) -> None:
        """Ask for a place in the next round; answered by `RoundBegan`, `JobClosed` or `RendezvousBroken`."""

    def fail(self, failure: Failure) -> None:
        """End this round for all nodes: a worker of this one has failed."""

    def succeed(self) -> None:
        """Report that all workers of this node have succeeded; answered by `AllSucceeded`, or another round's end."""

    def note_awaited_exit(self, awaits_exit: bool) -> None:
        """Note whether a worker of this node has left the other ranks and still runs.

        A failure elsewhere that blames a lost peer waits for its exit code.
        """

    def end_job(self, reason: str) -> None:
        """Close the job for all nodes, present and future: the user has interrupted it."""

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        """Leave the job; the others go on without this node if they may.

        The workers of this node end within `ends_within_ns`; call `close` after that. The others start their workers
        then.
        """

    def serves_others(self) -> bool:
        """Return whether the nodes meet at a store that ends with this process."""

    def close(self) -> None:
        """Close all connections, within a few seconds. Without `leave` before it, the others see a lost node."""
