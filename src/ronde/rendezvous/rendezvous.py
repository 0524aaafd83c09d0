"""The interface of a rendezvous for the agent of a node: its configuration, its methods, and its backends by name.

A backend is loaded when it is first used. A third party registers a factory by an entry point of the group
`ronde.rendezvous`, or by `register`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.rendezvous.membership import Budget, Failure, Node, RendezvousEvent, Rules
from ronde.values import FLAG

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "RendezvousConfig",
    "Rendezvous",
    "Factory",
    "create",
    "names",
    "register",
    "torchruns_names",
]

SECOND = 10**9
_BY_BACKEND = ("places_are_given", "rehost")  # fields of `Rules`


@dataclass(frozen=True)
class RendezvousConfig:
    """How the nodes of the job find each other.

    Attributes:
        backend: One of `names()`; "alone" (default) for one node without a store.
        endpoint: host:port, a path, or URLs, depending on the backend.
        run_id: The name of the job.
        min_nodes: The least number of nodes of a round (1).
        max_nodes: The greatest number of nodes of a round (1).
        node_rank: The given group rank of this node; -1 (default): none.
        spares: How many nodes may wait for a place without limit (0).
        join_timeout_ns: How long other nodes wait for a place, in nanoseconds (600 s).
        first_join_timeout_ns: The same before their first round (0: `join_timeout_ns`).
        last_call_ns: How long a round with the minimum of nodes waits for more, in nanoseconds (30 s).
        heartbeat_ns: The interval between heartbeats, in nanoseconds (5 s).
        missing_heartbeats: After how many missing heartbeats a node is lost (3).
        exit_barrier_ns: How long a node that has succeeded waits for the others, in nanoseconds (300 s).
        start_timeout_ns: How long to wait for the store, in nanoseconds (300 s).
        options: --rdzv-conf, as given.
        min_slots: The least number of slots that the nodes of a round have together (0).
        supply: The number of nodes that will ever exist; None (default) if others may take the place of lost ones.
        gives_way: When no restart is left, a failed worker takes its node out of the job and does not end the job
            (false).
        longest_end_ns: How long the workers of a node may take to end, in nanoseconds (0).
    """

    backend: str = "alone"
    endpoint: str = ""
    run_id: str = ""
    min_nodes: int = Rules.min_nodes
    max_nodes: int = Rules.max_nodes
    node_rank: int = -1
    spares: int = Rules.spares
    join_timeout_ns: int = Rules.join_timeout_ns
    first_join_timeout_ns: int = Rules.first_join_timeout_ns
    last_call_ns: int = Rules.last_call_ns
    heartbeat_ns: int = Rules.heartbeat_ns
    missing_heartbeats: int = Rules.missing_heartbeats
    exit_barrier_ns: int = 300 * SECOND
    start_timeout_ns: int = 300 * SECOND
    options: Mapping[str, str] = field(default_factory=dict)
    min_slots: int = Rules.min_slots
    supply: int | None = None
    gives_way: bool = Rules.gives_way
    longest_end_ns: int = 0

    def rules(self, **given: bool) -> Rules:
        """Return the parameters for the machines. Raises nothing.

        Args:
            given: Those that the backend decides: `places_are_given` and `rehost`.
        """
        shared = [field.name for field in fields(Rules) if field.name not in _BY_BACKEND]
        return Rules(**{name: getattr(self, name) for name in shared}, **given)

    @property
    def silence_ns(self) -> int:
        """After how much silence a node, or the store, counts as lost, in nanoseconds."""
        return self.rules().silence_ns

    def truth(self, option: str) -> bool | None:
        """Return the value of a yes-or-no option, None if it is not given.

        Args:
            option: Its name in `options`.

        Raises:
            UsageError: The value is neither yes nor no.
        """
        text = self.options.get(option)
        return None if text is None else bool(FLAG.read(text, f"--rdzv-conf {option}={text}"))


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
        """Return a descriptor that is readable while there are events. Raises nothing."""

    def events(self) -> list[RendezvousEvent]:
        """Return the events since the last call, in order. Raises nothing."""

    def join(self, node: Node, budget: Budget) -> None:
        """Ask for a place in the next round; answered by `RoundBegan`, `JobClosed` or `RendezvousBroken`.

        Raises nothing.

        Args:
            node: This node's description of itself; the rendezvous fills in `meeting`.
            budget: How often the job may go on after the end of a round; the same on all nodes.
        """

    def update_node(self, node: Node) -> None:
        """Replace this node's description in its request for a place; without effect if it has none. Raises nothing.

        Args:
            node: The new description.
        """

    def fail(self, failure: Failure) -> None:
        """End this round for all nodes: a worker of this one has failed. Raises nothing.

        Args:
            failure: The first failure of a worker of this node. `RoundEnded` or `JobClosed` brings it to all nodes.
        """

    def succeed(self) -> None:
        """Report that all workers of this node have succeeded; answered by `AllSucceeded`, or another round's end.

        Raises nothing.
        """

    def request_change(self, reason: str) -> None:
        """End this round for all nodes without a failure; `RoundEnded` brings a `ChangeRequested`.

        It counts neither as a restart nor as a change. Raises nothing.

        Args:
            reason: Why, in one line.
        """

    def note_awaited_exit(self, awaits_exit: bool) -> None:
        """Note whether a worker of this node has left the other ranks and still runs.

        A failure elsewhere that blames a lost peer waits for its exit code. Raises nothing.

        Args:
            awaits_exit: Whether there is such a worker now.
        """

    def end_job(self, reason: str) -> None:
        """Close the job for all nodes, present and future: the user has interrupted it. Raises nothing.

        Args:
            reason: Why, in one line, for the `JobClosed` of all nodes.
        """

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        """Leave the job; the others go on without this node if they may.

        Call `close` when the workers of this node have ended. The others start their workers then. Raises nothing.

        Args:
            reason: Why, in one line, for the messages of the others.
            ends_within_ns: The time within which the workers of this node end, in nanoseconds (0: they have ended).
        """

    def serves_others(self) -> bool:
        """Return whether the nodes meet at a store that ends with this process. Raises nothing."""

    def close(self) -> None:
        """Close all connections, within a few seconds. Without `leave` before it, the others see a lost node.

        Raises nothing.
        """


Factory = Callable[[RendezvousConfig, JobKey], Rendezvous]

_GROUP = "ronde.rendezvous"  # of entry points
_TORCHRUNS_GROUP = "torchrun.handlers"
_STORE_RENDEZVOUS = "ronde.rendezvous.store_rendezvous"
_OURS = {
    "alone": ("ronde.rendezvous.alone", "make"),
    "static": (_STORE_RENDEZVOUS, "make_static"),
    "tcp": (_STORE_RENDEZVOUS, "make_tcp"),
    "c10d": (_STORE_RENDEZVOUS, "make_tcp"),
    "file": (_STORE_RENDEZVOUS, "make_file"),
    "etcd": (_STORE_RENDEZVOUS, "make_etcd"),
    "etcd-v2": (_STORE_RENDEZVOUS, "make_etcd"),
}
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Register a backend of the rendezvous in this process.

    Args:
        name: The value of `RendezvousConfig.backend` that chooses it.
        factory: Takes a RendezvousConfig and the job key, and returns the node's `Rendezvous`.

    Raises:
        UsageError: The name is taken.
    """
    if name in _OURS or name in _registered:
        raise UsageError(f"there is already a rendezvous backend {name!r}")
    _registered[name] = factory


def create(config: RendezvousConfig, key: JobKey) -> Rendezvous:
    """Return this node's part in the rendezvous that the config describes.

    Returns at once; an event reports whether the store can be reached.

    Args:
        config: The user's configuration.
        key: The job key.

    Raises:
        UsageError: The config is invalid, the address to serve is taken, or the backend is unknown.
    """
    if not 1 <= config.min_nodes <= config.max_nodes:
        raise UsageError(
            f"{config.min_nodes} to {config.max_nodes} nodes are not a valid range: expected 1 <= MIN <= MAX"
        )
    return _factory(config.backend)(config, key)


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in _OURS:
        module, attribute = _OURS[name]
        found: Factory = getattr(importlib.import_module(module), attribute)
        return found
    points = _entry_points(_GROUP)
    if name in points:
        loaded: Factory = points[name].load()
        return loaded
    raise UsageError(f"unknown rendezvous backend {name!r}: there are {', '.join(names())}")


def names() -> list[str]:
    """Return the names of all backends, including those of installed third parties. Raises nothing."""
    return sorted({*_OURS, *_registered, *_entry_points(_GROUP)})


def torchruns_names() -> list[str]:
    """Return the names of installed third-party handlers for torchrun, which Ronde cannot use. Raises nothing."""
    return sorted(_entry_points(_TORCHRUNS_GROUP))


def _entry_points(group: str) -> dict[str, EntryPoint]:
    # Here, because it imports `random` and others, which a file beside the script may hide by mistake.
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=group)}
