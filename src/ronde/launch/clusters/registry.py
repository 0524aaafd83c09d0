"""The clusters that packages have registered by entry points of the group `ronde.clusters`.

An entry point names a callable without required arguments that returns a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable

from ronde.errors import UsageError
from ronde.launch.clusters.base import Cluster

__all__ = ["registered_cluster"]

_GROUP = "ronde.clusters"


def registered_cluster(name: str) -> Cluster:
    """Return a new cluster of a name, such as "spark".

    Args:
        name: The name of an entry point of the group `ronde.clusters`.

    Raises:
        UsageError: No installed package has registered the name, its platform is not installed, or the cluster cannot
            be made, for example because there is no Spark session.
    """
    from importlib.metadata import entry_points  # here, because it is slow and seldom needed

    points = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UsageError(
            f"unknown cluster {name!r}: the registered ones are: {known} (docs/adding-a-cluster.md)"
        )
    try:
        make: Callable[[], Cluster] = points[name].load()
    except ImportError as error:
        raise UsageError(f"the cluster {name!r} cannot be used: {error}; install what it needs") from None
    return make()
