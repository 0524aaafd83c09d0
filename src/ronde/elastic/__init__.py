"""Training that survives the loss of ranks, in place: survivors keep their processes, and go on from the last commit.

    @ronde.elastic.run
    def train(state):
        for batch in state.batches(data, global_batch=256):
            step(batch)
            state.commit()

`ronde.torch.elastic` has states of PyTorch's objects.
"""

from __future__ import annotations

from ronde.elastic.batches import Pieces
from ronde.elastic.goodput import Goodput
from ronde.elastic.running import run
from ronde.elastic.state import HostsUpdatedInterrupt, ObjectState, Part, State, goodput

__all__ = ["Goodput", "HostsUpdatedInterrupt", "ObjectState", "Part", "Pieces", "State", "goodput", "run"]
