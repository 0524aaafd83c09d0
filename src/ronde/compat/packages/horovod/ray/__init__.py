"""`horovod.ray`: the executor of `ronde.ray`, in whose workers Ronde answers for Horovod."""

from __future__ import annotations

from .elastic import ElasticRayExecutor
from .runner import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]
