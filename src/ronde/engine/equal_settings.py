"""Checks the settings of the engine that must be the same on all ranks."""

from __future__ import annotations

from functools import partial

from ronde.comm.byte_exchange import allgather_bytes
from ronde.comm.communicator import Communicator
from ronde.comm.equal_values import require_equal
from ronde.settings import Settings

__all__ = ["agree_on_settings"]

ALIKE = (
    *("cache_capacity", "fusion_bytes", "batch_bytes", "largest_fused_bytes", "disable_group_fusion"),
    *("join_average", "autotune", "tree_arity", "backends"),
)


def agree_on_settings(comm: Communicator, settings: Settings) -> None:
    """Raise MismatchError on all ranks unless their settings are equal. All ranks call it."""
    require_equal(partial(allgather_bytes, comm), {name: getattr(settings, name) for name in ALIKE})
