"""A reset callback that changes the state, in which another rank dies the first time."""

from __future__ import annotations

import json
import os
import signal
import sys

import ronde
import ronde.elastic

called: list[int] = []
first_rank = -1
state = ronde.elastic.ObjectState(step=0, sizes=[])


def note_size() -> None:
    """Note the size of each new world, in the state and in this process."""
    if first_rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    called.append(ronde.size())
    state.sizes.append(ronde.size())


@ronde.elastic.run
def train(state: ronde.elastic.ObjectState) -> None:
    while state.step < 10:
        state.step += 1
        if state.step == 5 and first_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (state.save if state.step % 2 else state.commit)()


ronde.init()
first_rank = ronde.rank()
state.register_reset_callbacks([note_size])
train(state)
sys.stdout.write(json.dumps({"sizes": state.sizes, "called": called, "step": state.step}) + "\n")
