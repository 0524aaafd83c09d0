"""Ray as a cluster: one Ray actor for each slot, in a placement group that reserves all slots of a request together.

Ray never restarts these actors, because the driver decides what follows a loss. An agent ends when its actor is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskPlacementGroupRemoved
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.clusters.cluster import Capabilities, Capacity, SlotEvents, Ticket
from ronde.launch.clusters.platforms import report_unencrypted
from ronde.launch.driver.task import run_task

__all__ = ["Placing", "RayCluster"]


@dataclass(frozen=True)
class Placing:
    """What a slot needs, and how slots lie on hosts.

    Attributes:
        cpus, gpus: The number of CPUs and GPUs of a slot (default: 1 and 0).
        slots_per_bundle: Slots that share a bundle of the placement group, and so a host (default: 1).
        strategy: Ray's strategy for the bundles: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD (default: PACK).
    """

    cpus: float = 1
    gpus: float = 0
    slots_per_bundle: int = 1
    strategy: str = "PACK"

    def slots_in(self, resources: dict[str, float]) -> int:
        """Return how many slots fit into resources. Raises nothing.

        Args:
            resources: Numbers by the names of Ray's resources, such as {"CPU": 8.0, "GPU": 1.0}.
        """
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        return min((int(resources.get(name, 0) // each) for name, each in needs.items() if each), default=0)


class RayCluster:
    """Slots of the Ray cluster to which this process is connected (`ray.init`).

        results = ronde.run(train, np=4, cluster=RayCluster(Placing(gpus=1)))

    Args:
        placing: What a slot needs, and how slots lie on hosts (default: one CPU each, on as few hosts as possible).
        group: The placement group in which the tasks run. Without it (default), the cluster reserves a bundle for each
            slot and keeps it for a later task of this slot, until no task runs.
        requires_encryption: Refuse to send the job's key over a connection that Ray does not encrypt, instead of a
            warning (default: false).

    Raises:
        Nothing: `request` checks the connection.
    """

    name = "Ray"
    capabilities = Capabilities(elastic=True, gang=True)

    def __init__(
        self,
        placing: Placing | None = None,
        group: PlacementGroup | None = None,
        requires_encryption: bool = False,
    ) -> None:
        self._requires_encryption = requires_encryption
        self._placing = placing or Placing()
        self._given_group = group
        self._lock = threading.Lock()
        self._groups: list[PlacementGroup] = []  # own ones
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}  # by slot
        self._running: dict[ray.ObjectRef[Any], Any] = {}  # the actors of the tasks that have not ended

    def capacity(self) -> Capacity | None:
        """Return the number of slots of all Ray nodes, and of free ones; None in a given placement group.

        Also None if this process is not connected to a Ray cluster. Raises nothing.
        """
        if self._given_group or not ray.is_initialized():
            return None
        slots_in = self._placing.slots_in
        return Capacity(slots_in(ray.cluster_resources()), slots_in(ray.available_resources()))

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Start a Ray actor for each ticket as soon as the placement group has its resources. Returns at once.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks.

        Raises:
            UsageError: This process is not connected to a Ray cluster, or the key would travel unencrypted although
                `requires_encryption` is true.
        """
        if not ray.is_initialized():  # else Ray would start a cluster on this machine
            raise UsageError("this process is not connected to a Ray cluster: call ray.init() first")
        _check_encryption(self._requires_encryption)
        needs = {"num_cpus": self._placing.cpus, "num_gpus": self._placing.gpus}
        slot_actor = ray.remote(**needs, max_restarts=0)(_SlotActor)
        slots: dict[ray.ObjectRef[Any], int] = {}
        with self._lock:
            self._reserve([ticket.slot for ticket in tickets if ticket.slot not in self._bundles])
            for ticket in tickets:
                strategy = PlacementGroupSchedulingStrategy(*self._bundles[ticket.slot])
                actor = slot_actor.options(scheduling_strategy=strategy).remote()
                ref = actor.run.remote(ticket)
                slots[ref], self._running[ref] = ticket.slot, actor
        threading.Thread(target=self._follow, args=(slots, events), name="ronde-ray", daemon=True).start()

    def cancel(self, reason: str) -> None:
        """Kill the actors of all slots. Raises nothing.

        Args:
            reason: Has no effect: Ray takes no reason.
        """
        with self._lock:
            actors = list(self._running.values())
        if ray.is_initialized():  # else this process has left Ray, which has ended them
            for actor in actors:
                ray.kill(actor)

    def _reserve(self, slots: Sequence[int]) -> None:
        if self._given_group:
            self._bundles.update(dict.fromkeys(slots, (self._given_group, -1)))  # any bundle
        elif slots:
            group = placement_group(_bundles_for(len(slots), self._placing), strategy=self._placing.strategy)
            self._groups.append(group)
            each = self._placing.slots_per_bundle
            self._bundles.update({slot: (group, index // each) for index, slot in enumerate(slots)})

    def _follow(self, slots: dict[ray.ObjectRef[Any], int], events: SlotEvents) -> None:
        """Report the end of each task. Ray's own callbacks would not do: they must not call Ray."""
        waiting = dict(slots)
        try:
            while waiting:
                (ref,), _ = ray.wait(list(waiting), num_returns=1)
                with self._lock:
                    del self._running[ref]
                _report(waiting.pop(ref), ref, events)
            self._release()
        except SystemExit:  # Ray raises it in threads when ray.shutdown() is called
            events.all_ended("this process has left the Ray cluster")

    def _release(self) -> None:
        """Give the bundles back if no task runs."""
        with self._lock:
            if self._running:
                return
            groups, self._groups = self._groups, []
            self._bundles.clear()
        for group in groups:
            remove_placement_group(group)


class _SlotActor:
    """An actor for one task: `ray.cancel` of a plain one that completes meanwhile would end the caller (Ray 2.60)."""

    def run(self, ticket: Ticket) -> None:
        run_task(ticket)


def _report(slot: int, ref: ray.ObjectRef[Any], events: SlotEvents) -> None:
    try:
        ray.get(ref)
    except TaskPlacementGroupRemoved:
        events.all_ended("the placement group of the Ray tasks was removed")
    except RayError as error:
        events.slot_ended(slot, _describe(error))
    else:
        events.slot_ended(slot, "")


def _check_encryption(is_required: bool) -> None:
    """Warn, or raise UsageError, if the job's key would travel from this process to other hosts in the clear."""
    hosts = {node["NodeManagerAddress"] for node in ray.nodes()}
    if len(hosts) > 1 and environment().get("RAY_USE_TLS") != "1":
        report_unencrypted("Ray", "set RAY_USE_TLS=1 and its certificates on all nodes", is_required)


def _bundles_for(slots: int, placing: Placing) -> list[dict[str, float]]:
    bundles = []
    for first in range(0, slots, placing.slots_per_bundle):
        count = min(placing.slots_per_bundle, slots - first)
        needs = {"CPU": placing.cpus * count, "GPU": placing.gpus * count}
        bundles.append({name: number for name, number in needs.items() if number})
    return bundles


def _describe(error: BaseException) -> str:
    """Return in one line why a task ended: its exception, or what Ray reports about its process."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first_line = (str(cause).strip() or "no details").splitlines()[0]
    return f"{type(cause).__name__}: {first_line}"
