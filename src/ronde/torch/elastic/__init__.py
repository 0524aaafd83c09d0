"""Elastic training with PyTorch, with the names of `horovod.torch.elastic`.

    import ronde.torch as hvd

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, epoch=0))

docs/elastic-training.md describes it.
"""

from __future__ import annotations

from ronde.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from ronde.torch.elastic.process_groups import follow_worlds
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

follow_worlds()
