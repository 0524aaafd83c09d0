"""`horovod.ray`: the executor of `ronde.ray`."""

from __future__ import annotations

from ronde.ray import RayExecutor

__all__ = ["RayExecutor"]
