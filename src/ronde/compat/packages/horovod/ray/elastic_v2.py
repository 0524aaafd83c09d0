"""`horovod.ray.elastic_v2`: which nodes Ray has. What ran elastic jobs here is `horovod.ray.RayExecutor`."""

from __future__ import annotations

from typing import NoReturn

from .. import missing_from  # noqa: TID252 - type checkers do not know a package horovod
from .elastic import RayHostDiscovery

__all__ = ["RayHostDiscovery"]


def __getattr__(name: str) -> NoReturn:
    raise missing_from("horovod.ray.elastic_v2", name)
