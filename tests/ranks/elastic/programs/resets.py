"""A reset callback that changes the state, in which another rank dies the first time.

The argument `sharded` adds a sharded part.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np

import ronde
import ronde.elastic

called: list[int] = []
first_rank = -1
state = ronde.elastic.ObjectState(step=0, sizes=[])


class Share:
    """A rank's share of twelve numbers."""

    is_sharded = True

    def __init__(self) -> None:
        self.live = np.zeros(12 // ronde.size())
        self.copy = self.live.copy()

    def save(self) -> None:
        self.copy = self.live.copy()

    def restore(self) -> None:
        self.live = self.copy.copy()

    def payload(self) -> object:
        return self.copy

    def load(self, payload: Any) -> None:
        self.copy = payload.copy()
        self.restore()

    def load_shards(self, payloads: list[Any]) -> None:
        self.load(np.array_split(np.concatenate(payloads), ronde.size())[ronde.rank()])


def note_size() -> None:
    """Note the size of each new world, in the state and in this process."""
    if first_rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    called.append(ronde.size())
    state.sizes.append(ronde.size())
    if share is not None:
        share.live += 100


@ronde.elastic.run
def train(state: ronde.elastic.ObjectState) -> None:
    while state.step < 10:
        state.step += 1
        if share is not None:
            share.live += 1
        if state.step == 5 and first_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        (state.save if state.step % 2 else state.commit)()


ronde.init()
first_rank = ronde.rank()
share = Share() if sys.argv[1:] == ["sharded"] else None
if share is not None:
    state.add_part("share", share)
state.register_reset_callbacks([note_size])
train(state)
result = {"sizes": state.sizes, "called": called, "step": state.step}
if share is not None:
    result["share"] = share.live.tolist()
sys.stdout.write(json.dumps(result) + "\n")
