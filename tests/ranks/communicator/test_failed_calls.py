"""After a failed call the rank's array in symmetric memory is its own: no peer writes to it any more."""

from __future__ import annotations

import os
import pathlib
import threading
import time
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import faults, ranks

COUNT = 1 << 25  # a peer writes its share of so many elements for some 10 ms
RESTORED = 7
ATTEMPTS = 20


def reduce_in_place(world: ronde.Communicator, operation: str, x: Any) -> None:
    if operation == "reduce":
        world.reduce(x, root=0, out=x if world.rank == 0 else None)
    else:
        world.allreduce(x, op=ronde.Sum, out=x)


def stop_when_it_writes(pid: int, x: Any) -> None:
    """Stop rank 1 once it has written to the first element of its share of rank 0's array."""
    first, end_s = COUNT // 2, time.monotonic() + 60
    before = x[first]
    while x[first] == before and time.monotonic() < end_s:
        time.sleep(0)
    faults.stop(pid)


def restore(operation: str, folder: str) -> tuple[str, int, float]:
    """Rank 1 is stopped in the middle of a call. Rank 0 gets an error, restores its array and lets rank 1 continue.

    Returns the error, how many elements were changed after it, and the sum of a later all-reduce of the engine.
    """
    ronde.init()
    world = ronde.world()
    x = world.empty(COUNT, np.float32)
    pids = world.allgather(np.array([os.getpid()]))
    left = pathlib.Path(folder) / "rank 1 has left the call"
    kind = "no error"
    for _ in range(ATTEMPTS):  # the stop may come too late
        x[:] = world.rank + 1
        stopping = threading.Thread(target=stop_when_it_writes, args=(int(pids[1]), x))
        if world.rank == 0:
            stopping.start()
        try:
            reduce_in_place(world, operation, x)
            world.barrier()
        except ronde.RondeError as error:
            kind = type(error).__name__
        x[:] = RESTORED
        if world.rank == 0:
            stopping.join()
            faults.resume(int(pids[1]))
        if kind != "no error":
            break
    if world.rank == 1:
        left.touch()
    end_s = time.monotonic() + 60
    while not left.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    changed = int((x != RESTORED).sum())
    # Another communicator of the same ranks, which has not failed, takes the array for what it is now.
    total = ronde.allreduce(x[:1000], name="x", op=ronde.Sum)
    return kind, changed, float(total.sum())


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["allreduce", "reduce"])
def test_a_stopped_peer_does_not_write_to_a_restored_array(operation: str, tmp_path: pathlib.Path) -> None:
    results = ranks.run(restore, 2, operation, str(tmp_path), environ={"RONDE_TIMEOUT": "1"})
    assert results == [("TimeoutError", 0, 2000.0 * RESTORED)] * 2
