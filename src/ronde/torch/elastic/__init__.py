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

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ronde import elastic
from ronde.elastic import HostsUpdatedInterrupt, ObjectState, State
from ronde.torch.elastic import process_groups
from ronde.torch.elastic.losses import is_peer_loss
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

P = ParamSpec("P")
R = TypeVar("R")
StateT = TypeVar("StateT", bound=State)

process_groups.install()
elastic.hooks["leave"].append(process_groups.leave)
elastic.hooks["joined"].append(process_groups.meet)
elastic.hooks["is_loss"].append(is_peer_loss)


def run(train: Callable[Concatenate[StateT, P], R]) -> Callable[Concatenate[StateT, P], R]:
    """Return a function that calls `train(state, ...)`, again after each change of the ranks; see `ronde.elastic.run`.

        @hvd.elastic.run
        def train(state): ...

    Process groups of torch.distributed that `train` makes end with it, so it makes them again when it is called again.
    """

    @functools.wraps(train)
    def training(state: Any, *arguments: Any, **named: Any) -> Any:
        with process_groups.in_training():
            return train(state, *arguments, **named)

    return elastic.run(training)
