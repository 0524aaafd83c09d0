"""Ronde on Ray: `RayExecutor` runs functions in workers on a Ray cluster. Needs `pip install 'ronde[ray]'`.

See docs/ray.md.
"""

from __future__ import annotations

from ronde.launch.clusters.platforms import needs_package

with needs_package("ray", "ray"):
    from ronde.ray.cluster import Placing, RayCluster
    from ronde.ray.executor import RayExecutor, RaySettings

__all__ = ["Placing", "RayCluster", "RayExecutor", "RaySettings"]
