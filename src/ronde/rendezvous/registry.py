"""The backends of the rendezvous, by name; each is loaded when it is first used.

A third party registers a factory by an entry point of the group `ronde.rendezvous`, or by `register`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.rendezvous.base import Rendezvous
from ronde.rendezvous.config import RendezvousConfig

__all__ = ["Factory", "create", "names", "register", "torchruns_names"]

Factory = Callable[[RendezvousConfig, JobKey], Rendezvous]

_GROUP = "ronde.rendezvous"  # of entry points
_TORCHRUNS_GROUP = "torchrun.handlers"
_STORE_ACCESS = "ronde.rendezvous.store_access"
_OURS = {
    "alone": ("ronde.rendezvous.alone", "make"),
    "static": (_STORE_ACCESS, "make_static"),
    "tcp": (_STORE_ACCESS, "make_tcp"),
    "c10d": (_STORE_ACCESS, "make_tcp"),
    "file": (_STORE_ACCESS, "make_file"),
    "etcd": (_STORE_ACCESS, "make_etcd"),
    "etcd-v2": (_STORE_ACCESS, "make_etcd"),
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
    from importlib.metadata import entry_points  # here, because it is slow and seldom needed

    points = {point.name: point for point in entry_points(group=_GROUP)}
    if name in points:
        loaded: Factory = points[name].load()
        return loaded
    raise UsageError(f"unknown rendezvous backend {name!r}: there are {', '.join(names())}")


def names() -> list[str]:
    """Return the names of all backends, including those of installed third parties.

    Raises:
        Nothing.
    """
    from importlib.metadata import entry_points

    return sorted({*_OURS, *_registered, *(point.name for point in entry_points(group=_GROUP))})


def torchruns_names() -> list[str]:
    """Return the names of installed third-party handlers for torchrun, which Ronde cannot use.

    Raises:
        Nothing.
    """
    from importlib.metadata import entry_points

    return sorted(point.name for point in entry_points(group=_TORCHRUNS_GROUP))
