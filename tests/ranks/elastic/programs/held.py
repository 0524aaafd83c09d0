"""Holds what belongs to a world, and uses it in the next world: handles, communicators, process sets, arrays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ronde
import ronde.elastic

held: dict[str, Any] = {}


def error_of(call: Callable[[], object]) -> str:
    """Return the type of the exception that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


@ronde.elastic.run
def train(state: ronde.elastic.ObjectState) -> None:
    """Wait for the loss of a rank the first time, and look at what is held the second time."""
    if not held:
        hold()
        print(json.dumps({"holds": ronde.rank()}), flush=True)
        while True:
            state.commit()
            time.sleep(0.002)
    old = held["set"]
    state.errors = {
        "handle": error_of(held["handle"].wait),
        "later handle": error_of(held["handle"].wait),
        "world": error_of(lambda: held["world"].allreduce(np.ones(3))),
        "group": error_of(held["group"].barrier),
        "set": error_of(lambda: ronde.allreduce(np.ones(3), name="of set", process_set=old)),
    }
    state.values = [held["array"].sum(), *(held["array"][:2] + 1)]
    ronde.add_process_set(old)
    if old.included():
        state.of_set = float(ronde.allreduce(np.ones(3), op=ronde.Sum, name="of set", process_set=old)[0])
    mine = ronde.world().empty(10)
    mine[:] = ronde.rank() + 1
    state.symmetric = float(ronde.world().allreduce(mine)[0])
    state.sum = float(ronde.allreduce(np.ones(3), op=ronde.Sum, name="held")[0])


def hold() -> None:
    """Take one of everything."""
    world = ronde.world()
    held["world"], held["group"] = world, world.duplicate()
    held["array"] = world.empty(1000)
    held["array"][:] = world.rank + 1
    held["set"] = ronde.add_process_set([0, 1])
    if world.rank == 0:  # the others do not submit it, so that it never runs
        held["handle"] = ronde.allreduce_async(np.ones(3), name="held")
    else:
        held["handle"] = ronde.allreduce_async(np.ones(3), name=f"held by {world.rank}")


if __name__ == "__main__":
    result = ronde.elastic.ObjectState(errors={}, values=[], of_set=0.0, symmetric=0.0, sum=0.0)
    train(result)
    print(
        json.dumps(
            {
                "errors": result.errors,
                "values": [float(each) for each in result.values],
                "sums": [result.of_set, result.symmetric, result.sum],
            }
        ),
        flush=True,
    )
