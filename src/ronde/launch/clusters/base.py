"""The names of `cluster` under the module that adapters of other packages import them from."""

from __future__ import annotations

from ronde.launch.clusters.cluster import Capabilities, Capacity, Cluster, SlotEvents, Ticket

__all__ = ["Capabilities", "Capacity", "Cluster", "SlotEvents", "Ticket"]
