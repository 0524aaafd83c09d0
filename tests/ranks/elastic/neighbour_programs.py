"""What ranks do in the tests of copies in other ranks' memory: commits, losses, and a new world of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import numpy as np
from tests.ranks.elastic.snapshot_programs import HalvedShard
from tests.unit.elastic.parts import Shard

import ronde
from ronde.comm.communicator import Communicator
from ronde.elastic.neighbours import Neighbours, ShardsLostError

__all__ = ["survive"]


def _commit(neighbours: Neighbours, commit: int, shard: Shard, world: Communicator) -> None:
    shard.live["values"][commit] = -commit
    neighbours.secure(commit, {"shard": shard}, world)
    world.barrier()
    neighbours.accept(world.size)


def survive(size: int, lost: tuple[int, ...], order: tuple[int, ...], phase: str, can_reshard: bool) -> Any:
    """Commit three times, lose ranks before or in the fourth commit, and settle in a world with spares.

    There is no launcher: the old world and the new one, `order`, are groups of ranks that are started. So the new one
    is made before the loss.

    Return the values of this rank's shard and whose copies it has, or the text of an error.
    """
    ronde.init()
    everyone = ronde.world()
    old = everyone.group(range(size))
    is_new = everyone.rank in order
    new = everyone.split(0 if is_new else None, order.index(everyone.rank) if is_new else 0)
    neighbours = Neighbours()
    kind = HalvedShard if can_reshard else Shard
    shard = kind(values=np.arange(1000.0) + 1000 * everyone.rank)
    if old is not None:
        for commit in (1, 2, 3):
            _commit(neighbours, commit, shard, old)
        if everyone.rank in lost and phase == "before the commit":
            time.sleep(0.5)  # until all have passed the last barrier
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(ronde.PeerLostError):
            shard.live["values"][4] = -4
            neighbours.secure(4, {"shard": shard}, old)
            if everyone.rank in lost:
                os.kill(os.getpid(), signal.SIGKILL)
            old.barrier()
    assert new is not None
    if isinstance(shard, HalvedShard):
        shard.share, shard.num_shares = new.rank, new.size
    try:
        neighbours.settle(3, {"shard": shard}, new)
    except (ShardsLostError, ronde.UsageError) as error:
        return str(error)
    return shard.live["values"].tolist(), sorted(set(neighbours.known_shards(3)) - {new.rank})
