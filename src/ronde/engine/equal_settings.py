"""Settings of the engine that must be the same on all ranks."""

from __future__ import annotations

import json

import numpy as np

from ronde.comm.communicator import Communicator
from ronde.errors import MismatchError
from ronde.settings import Settings

__all__ = ["agree_on_settings"]

ALIKE = (
    *("cache_capacity", "fusion_bytes", "batch_bytes", "largest_fused_bytes", "disable_group_fusion"),
    *("join_average", "autotune", "tree_arity"),
)


def agree_on_settings(comm: Communicator, settings: Settings) -> None:
    """Compare them. All ranks call it; raises MismatchError on all of them."""
    mine = json.dumps([getattr(settings, name) for name in ALIKE]).encode()
    sizes = comm.allgather(np.array([len(mine)])).tolist()
    rest = comm.allgather(np.frombuffer(mine, np.uint8)).tobytes()
    first: list[object] = []
    for rank, size in enumerate(sizes):
        values, rest = json.loads(rest[:size]), rest[size:]
        first = first or values
        for name, ours, theirs in zip(ALIKE, first, values):
            if ours != theirs:
                raise MismatchError(
                    f"the setting {name} must be the same on all ranks: it is {ours} on rank 0 and {theirs} on "
                    f"rank {rank}"
                )
