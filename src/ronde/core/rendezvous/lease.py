"""For how long a node may run workers after its last sign of life, and how long the others wait for them to end. Pure.

The others cannot ask a node that is cut off or frozen whether its workers have ended. So both sides go by time, each by
its own clock:

1. A node may run workers for `silence_ns` from the moment in which it *sent* the last heartbeat that the store has
   confirmed, or joined the round. Then it kills them (`WorkerLease`).
2. The leader begins no round before `silence_ns` and one heartbeat more have passed since it *received* the last
   heartbeat, or the wish to join, of a node that is lost (`LeftoverWorkers`). Both are received after they were sent,
   so the difference is a margin: for killing processes, and for clocks that do not run alike.
3. The leader need not wait for a node that said itself that it has no workers, or whose machine says that its agent
   has ended: the kernel ends workers with their agent. So it asks the machine when the connection of the agent breaks,
   also later.
4. A node that leaves says within what time its workers end; they may save what they have. Until then, and a heartbeat
   more, the leader waits for its agent to end. Rule 1 holds for them, too.

A process that is frozen together with its agent can do nothing, but both may thaw at any later time. What such a worker
still does before its agent kills it, no lease can prevent: scripts need the number of the round for that
(`ronde.checkpoint`).

Source: Gray and Cheriton, Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency, SOSP
1989, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from ronde.core.rendezvous.rules import Rules

__all__ = ["WorkerLease", "LeftoverWorkers"]


class WorkerLease:
    """The permission of this node to run workers."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._from_ns: int | None = None
        self._sent: dict[
            bytes, int
        ] = {}  # heartbeats that the store has not confirmed, and when they were sent

    def begin_lease(self, now_ns: int) -> None:
        """The node has no workers, and asks for a place in the next round."""
        self._from_ns = now_ns

    def note_sent(self, now_ns: int, heartbeat: bytes) -> None:
        """This heartbeat is on its way to the store. Each is different."""
        self._sent[heartbeat] = now_ns

    def note_confirmed(self, heartbeat: bytes) -> None:
        """The store has it, and with it all that were sent before."""
        if (sent_ns := self._sent.get(heartbeat)) is not None:
            self._from_ns = sent_ns if self._from_ns is None else max(self._from_ns, sent_ns)
            self._sent = {each: at_ns for each, at_ns in self._sent.items() if at_ns > sent_ns}

    @property
    def ends_ns(self) -> int | None:
        """When the permission ends; None before the node has joined."""
        return None if self._from_ns is None else self._from_ns + self._rules.silence_ns

    def is_being_renewed(self, now_ns: int) -> bool:
        """Whether a heartbeat is on its way that would renew it."""
        return any(now_ns < sent_ns + self._rules.silence_ns for sent_ns in self._sent.values())

    def has_ended(self, now_ns: int) -> bool:
        """Whether the others may have gone on, so that the workers have to end."""
        return self.ends_ns is not None and now_ns >= self.ends_ns


class LeftoverWorkers:
    """The lost nodes that may still have workers, as the leader knows them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._until_ns: dict[str, int] = {}

    def add_lost_node(self, node: str, received_ns: int) -> None:
        """This node is lost, and was heard last at that time."""
        self.expect_end(node, received_ns + self._rules.silence_ns)

    def expect_end(self, node: str, end_ns: int) -> None:
        """The workers of this node end then, by its own clock at the latest."""
        self._until_ns[node] = end_ns + self._rules.heartbeat_ns

    @property
    def nodes(self) -> KeysView[str]:
        """Their ids."""
        return self._until_ns.keys()

    def discard_nodes(self, nodes: Iterable[str]) -> None:
        """The workers of these nodes have ended."""
        for node in nodes:
            self._until_ns.pop(node, None)

    @property
    def until_ns(self) -> int:
        """When the last of them have ended for certain; 0 if there are none."""
        return max(self._until_ns.values(), default=0)
