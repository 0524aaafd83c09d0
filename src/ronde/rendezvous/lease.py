"""How long a node may run workers after its last sign of life, and how long the others wait for them to end. Pure.

The others cannot ask a node that is cut off or frozen whether its workers have ended. So both sides go by time, each by
its own clock:

1. A node may run workers for `silence_ns` after it *sent* the last heartbeat that the store has confirmed, or joined
   the round. Then it kills them (`WorkerLease`), also those that are still ending after their round.
2. The leader begins no round until `silence_ns` and one heartbeat interval have passed since it *received* the last
   heartbeat, or the join request, of a lost node (`LeftoverWorkers`). A message arrives after it was sent, so the
   difference is a margin: for killing processes, and for clocks that run at different speeds. The leader reads the
   heartbeats of lost nodes, too: a node that was frozen renews its lease when it wakes up in time, and may still be
   ending its workers. Such heartbeats count only as long as the leader waits for a survivor that does not join.
3. The leader does not wait for a node that has itself reported that it has no workers, or whose machine reports that
   the agent has ended: the kernel ends workers with their agent. So the leader probes the machine when the agent's
   connection breaks, also if that happens later.
4. A node that leaves announces within what time its workers end; they may save their state. The leader waits for the
   agent to end until then and one heartbeat interval more. Rule 1 holds for these workers, too.

A worker may be frozen together with its agent, and both may thaw at any later time. No lease can prevent what such a
worker does before its agent kills it. That is why checkpoints compare numbers of rounds (`ronde.checkpoints`).

Source: Gray and Cheriton, Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency, SOSP
1989, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from ronde.rendezvous.rules import Rules

__all__ = ["WorkerLease", "LeftoverWorkers"]


class WorkerLease:
    """The permission of this node to run workers."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._from_ns: int | None = None
        self._sent: dict[bytes, int] = {}  # by heartbeat that the store has not confirmed: when it was sent

    def begin_lease(self, now_ns: int) -> None:
        """Begin a lease: the node has no workers, and asks for a place in the next round."""
        self._from_ns = now_ns

    def note_sent(self, now_ns: int, heartbeat: bytes) -> None:
        """Note that this heartbeat is on its way to the store. All heartbeats differ."""
        self._sent[heartbeat] = now_ns

    def note_confirmed(self, heartbeat: bytes) -> None:
        """Note that the store has this heartbeat, and so all earlier ones."""
        if (sent_ns := self._sent.get(heartbeat)) is not None:
            self._from_ns = sent_ns if self._from_ns is None else max(self._from_ns, sent_ns)
            self._sent = {each: at_ns for each, at_ns in self._sent.items() if at_ns > sent_ns}

    @property
    def ends_ns(self) -> int | None:
        """When the lease ends; None before the node has joined."""
        return None if self._from_ns is None else self._from_ns + self._rules.silence_ns

    def is_being_renewed(self, now_ns: int) -> bool:
        """Whether a heartbeat is on its way whose confirmation would renew the lease."""
        return any(now_ns < sent_ns + self._rules.silence_ns for sent_ns in self._sent.values())

    def has_ended(self, now_ns: int) -> bool:
        """Whether the lease has run out: the others may have gone on, so the workers must end."""
        return self.ends_ns is not None and now_ns >= self.ends_ns


class LeftoverWorkers:
    """The lost nodes that may still have workers, as far as the leader knows."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._until_ns: dict[str, int] = {}

    def add_lost_node(self, node: str, received_ns: int) -> None:
        """Add a lost node whose last sign of life arrived at that time."""
        self.expect_end(node, received_ns + self._rules.silence_ns)

    def expect_end(self, node: str, end_ns: int) -> None:
        """Expect the workers of this node to end by then, as measured by the node's clock."""
        self._until_ns[node] = end_ns + self._rules.heartbeat_ns

    @property
    def nodes(self) -> KeysView[str]:
        """The ids of these nodes."""
        return self._until_ns.keys()

    def discard_nodes(self, nodes: Iterable[str]) -> None:
        """Note that the workers of these nodes have ended."""
        for node in nodes:
            self._until_ns.pop(node, None)

    @property
    def until_ns(self) -> int:
        """When all of these workers have certainly ended; 0 if there are none."""
        return max(self._until_ns.values(), default=0)
