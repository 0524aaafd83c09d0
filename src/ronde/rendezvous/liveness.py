"""How a node shows that it lives, and how long it may run workers after its last sign of life. Pure.

Held keys and the sentinel

1. A node holds `alive/ID`; the key goes when the node's connection does. Its heartbeats are in `heartbeat/ID`, which
   stays until the node is gone and its last heartbeat has been read.
2. A store that restarts, or that drops a client which it could not reach, loses the held keys. The clients then hold
   them again, each in its own time, so for a while living nodes look dead. Therefore every node has a *sentinel*: it
   holds `sentinel/ID` with one value, then sets the key to another value, new each time. If the store drops held keys,
   it drops the sentinel, and the client restores only the first value. A node reads its own sentinel together with the
   held keys of others: if the sentinel has the value that was set, every key seen since, and gone now, was given up
   by its owner.
3. A node whose sentinel is lost starts over. The rule needs operations in order (`FindChanges`): a `Watch` may report
   values older than the known ones, and is only a reason to read.

The lease

The others cannot ask a node that is cut off or frozen whether its workers have ended. So both sides go by time, each by
its own clock:

4. A node may run workers for `silence_ns` after it *sent* the last heartbeat that the store has confirmed, or joined
   the round. Then it kills them (`WorkerLease`), also those that are still ending after their round. Workers that
   continue may leave their world instead, within half a heartbeat (`launch/agent/decisions`, rule 9).
5. The leader begins no round until `silence_ns` and one heartbeat interval have passed since it *received* the last
   heartbeat, or the join request, of a lost node (`LeftoverWorkers`). A message arrives after it was sent, so the
   difference is a margin: for killing processes, and for clocks that run at different speeds. The leader reads the
   heartbeats of lost nodes, too: a node that was frozen renews its lease when it wakes up in time, and may still be
   ending its workers. Such heartbeats count only as long as the leader waits for a survivor that does not join.
6. The leader does not wait for a node that has itself reported that it has no workers, or whose machine reports that
   the agent has ended: the kernel ends workers with their agent. So the leader probes the machine when the agent's
   connection breaks, also if that happens later.
7. A node that leaves announces within what time its workers end; they may save their state. The leader waits for the
   agent to end until then and one heartbeat interval more. Rule 4 holds for these workers, too.

A worker may be frozen together with its agent, and both may thaw at any later time. No lease can prevent what such a
worker does before its agent kills it. That is why checkpoints compare numbers of rounds (`ronde.checkpoints`).

Source: Gray and Cheriton, Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency, SOSP
1989, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping

from ronde.rendezvous.effects import Delete, Effect, Hold, Set, Values
from ronde.rendezvous.membership import Rules
from ronde.rendezvous.state import ALIVE, Heartbeat, alive_key, encode, heartbeat_key

__all__ = [
    "Liveness",
    "WorkerLease",
    "LeftoverWorkers",
]

HELD = b"held"


class Liveness:
    """Sends heartbeats, holds the keys of this node, and keeps its lease.

    Set `id` before all else. `next_heartbeat_ns`: when the next heartbeat is due; `sentinel`: the key and value to read
    together with keys that others hold.
    """

    def __init__(self, rules: Rules) -> None:
        self.id = ""
        self.next_heartbeat_ns = 0
        self._rules = rules
        self.sentinel: dict[str, bytes] = {}
        self.lease = WorkerLease(rules)
        # The last heartbeat in the store, unless the lease counts it already.
        self._stored: bytes | None = None
        self._sentinel_key = ""
        self._sentinels = 0
        self._heartbeats = 0
        self._succeeded = -1
        self._awaits_exit = False
        self._has_ended = False

    def hold_keys(self, now_ns: int) -> list[Effect]:
        """Hold this node's keys, in a store that may have lost them, or is another one."""
        self._sentinels += 1
        self._stored = None
        self._sentinel_key = f"sentinel/{self.id}"
        self.sentinel = {self._sentinel_key: b"%d" % self._sentinels}
        holds = [Hold(alive_key(self.id), ALIVE), Hold(self._sentinel_key, HELD)]
        return [*holds, Set(self.sentinel), *self.send_heartbeat(now_ns)]

    def send_heartbeat(
        self, now_ns: int, succeeded: int | None = None, awaits_exit: bool | None = None
    ) -> list[Effect]:
        """Write a heartbeat. None: as in the last one.

        `succeeded`: the round in which all workers of this node have now succeeded. `awaits_exit`: as of `Heartbeat`.
        """
        self._succeeded = self._succeeded if succeeded is None else succeeded
        self._awaits_exit = self._awaits_exit if awaits_exit is None else awaits_exit
        self._heartbeats += 1
        self.next_heartbeat_ns = now_ns + self._rules.heartbeat_ns
        heartbeat = encode(Heartbeat(self._heartbeats, self._succeeded, self._awaits_exit))
        self.lease.note_sent(now_ns, heartbeat)
        return [] if self._has_ended else [Set({heartbeat_key(self.id): heartbeat})]

    def note_stored(self, values: Mapping[str, bytes]) -> None:
        """Note that the store has set these values."""
        self._stored = values.get(heartbeat_key(self.id), self._stored)

    def has_lease(self, now_ns: int) -> bool:
        """Return whether this node may run workers."""
        return not self.lease.has_ended(now_ns)

    def renew_lease(self) -> bool:
        """Count the stored heartbeat, because the others read this store; return whether it is a new one."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self.lease.note_confirmed(stored)
        return stored is not None

    def end_heartbeats(self) -> list[Effect]:
        """Delete the heartbeat and send none any more: the job is over."""
        if self._has_ended:
            return []
        self._has_ended = True
        return [Delete((heartbeat_key(self.id),))]

    def is_outdated(self, asked: Values) -> bool:
        """Return whether this reading was asked for before the keys were last held."""
        return self._sentinel_key in asked and asked[self._sentinel_key] != self.sentinel[self._sentinel_key]

    def has_lost_sentinel(self, changed: Values) -> bool:
        """Return whether the sentinel has another value, so that the store may have lost the keys of others, too."""
        return (
            self._sentinel_key in changed and changed[self._sentinel_key] != self.sentinel[self._sentinel_key]
        )


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
