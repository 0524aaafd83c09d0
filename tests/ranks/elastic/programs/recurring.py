"""Trains with an error that looks like a loss, on all ranks, at the same step each time."""

from __future__ import annotations

import sys

import ronde
import ronde.elastic


@ronde.elastic.run
def train(state: ronde.elastic.ObjectState) -> None:
    while state.step < 30:
        ronde.world().barrier()
        state.step += 1
        if state.step == 10:
            raise ronde.TimeoutError("this step is too slow", "step", 10**9, ())
        state.commit()


state = ronde.elastic.ObjectState(step=0)
if "callback" in sys.argv:
    state.register_reset_callbacks([state.save])
train(state)
