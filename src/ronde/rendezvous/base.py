"""The interface of a rendezvous for the agent of a node."""

from __future__ import annotations

from typing import Protocol

from ronde.rendezvous.membership import Budget, Failure, Node, RendezvousEvent

__all__ = ["Rendezvous"]


class Rendezvous(Protocol):
    """One node's part in the rendezvous of its job.

    All methods return at once, and answer by events; call them from one thread. Call `join` first; after `RoundBegan`,
    `fail` or `succeed`, each once at most, where `fail` may follow `succeed` and takes it back while the round lasts;
    after `RoundEnded` or `Ejected`, `join` again; `close` last. While workers run, `RoundEnded`, `Ejected`, `JobClosed`
    or `RendezvousBroken` may arrive at any time: end the workers then. `JobClosed`, `RendezvousBroken` and
    `AllSucceeded` are last events, except that an `Ejected` after `RendezvousBroken` asks to kill workers that are
    still ending.

    No method raises an error: what goes wrong arrives as an event, `RendezvousBroken` if this node cannot take part any
    more.

    Subclass it without `typing.Protocol`: at run time it is an ordinary class, to which a protocol cannot be added.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events.

        Raises:
            Nothing.
        """

    def events(self) -> list[RendezvousEvent]:
        """Return the events since the last call, in order.

        Raises:
            Nothing.
        """

    def join(self, node: Node, budget: Budget) -> None:
        """Ask for a place in the next round; answered by `RoundBegan`, `JobClosed` or `RendezvousBroken`.

        Args:
            node: This node's description of itself; the rendezvous fills in `meeting`.
            budget: How often the job may go on after the end of a round; the same on all nodes.

        Raises:
            Nothing.
        """

    def fail(self, failure: Failure) -> None:
        """End this round for all nodes: a worker of this one has failed.

        Args:
            failure: The first failure of a worker of this node. `RoundEnded` or `JobClosed` brings it to all nodes.

        Raises:
            Nothing.
        """

    def succeed(self) -> None:
        """Report that all workers of this node have succeeded; answered by `AllSucceeded`, or another round's end.

        Raises:
            Nothing.
        """

    def note_awaited_exit(self, awaits_exit: bool) -> None:
        """Note whether a worker of this node has left the other ranks and still runs.

        A failure elsewhere that blames a lost peer waits for its exit code.

        Args:
            awaits_exit: Whether there is such a worker now.

        Raises:
            Nothing.
        """

    def end_job(self, reason: str) -> None:
        """Close the job for all nodes, present and future: the user has interrupted it.

        Args:
            reason: Why, in one line, for the `JobClosed` of all nodes.

        Raises:
            Nothing.
        """

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        """Leave the job; the others go on without this node if they may.

        Call `close` when the workers of this node have ended. The others start their workers then.

        Args:
            reason: Why, in one line, for the messages of the others.
            ends_within_ns: The time within which the workers of this node end, in nanoseconds (0: they have ended).

        Raises:
            Nothing.
        """

    def serves_others(self) -> bool:
        """Return whether the nodes meet at a store that ends with this process.

        Raises:
            Nothing.
        """

    def close(self) -> None:
        """Close all connections, within a few seconds. Without `leave` before it, the others see a lost node.

        Raises:
            Nothing.
        """
