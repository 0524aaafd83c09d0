"""A training that `test_elastic.py` starts, with a loss and a return: arguments are how it communicates, and a file.

It trains until the file exists, then to the end of the epoch. It prints a line for each call of `train`, and a result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch

import ronde.torch as hvd
import ronde.torch.distributed  # noqa: F401 - makes the backend known
from ronde.torch.elastic import process_groups

HOW, WHERE, STOP = sys.argv[1:4]
DIES_LATER = sys.argv[4:]  # a rank that dies when the group is made again
SAMPLES = 48
BATCH = 2  # per rank

torch.set_num_threads(1)
inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
answers = inputs.sum(dim=1, keepdim=True)


def say(**values: Any) -> None:
    print(json.dumps({"pid": os.getpid(), **values}), flush=True)


def make_group() -> None:
    torch.distributed.init_process_group(HOW)


def is_stopped() -> bool:
    return bool(hvd.allreduce(torch.tensor(int(os.path.exists(STOP))), op=hvd.Max, name="stop") > 0)


def die_in_making(*arguments: Any, **named: Any) -> None:
    """Die instead of making the group, in the round after the first, once."""
    if os.environ.get("RONDE_ROUND", "0") == "1" and os.environ["RANK"] == DIES_LATER[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    make_of_torch(*arguments, **named)


hvd.init()
if DIES_LATER:
    make_of_torch = process_groups._own.make or torch.distributed.init_process_group
    process_groups._own.make = die_in_making
elastic = hvd.elastic
if HOW != "optimizer" and WHERE == "before":
    make_group()
torch.manual_seed(hvd.rank())
network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
if HOW == "optimizer":
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())


@elastic.run
def train(state: Any) -> None:
    model: Any = network
    if HOW != "optimizer":
        if WHERE == "within":
            make_group()
        assert torch.distributed.get_world_size() == hvd.size()
        model = torch.nn.parallel.DistributedDataParallel(network)
    say(size=hvd.size())
    while not state.is_done:
        loader: Any = torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)
        for number, chosen in enumerate(loader):
            optimizer.zero_grad()
            (model(inputs[chosen]) - answers[chosen]).pow(2).mean().backward()
            optimizer.step()
            state.sampler.record_batch(number, BATCH)
            state.seen = state.seen + hvd.allgather(chosen, name="seen").tolist()
            state.commit()
        state.epochs = [*state.epochs, state.seen]
        state.seen, state.is_done = [], is_stopped()
        state.sampler.set_epoch(len(state.epochs))
        state.commit()
    if HOW != "optimizer":
        sizes = torch.ones(1)
        torch.distributed.all_reduce(sizes, group=torch.distributed.new_group(range(hvd.size())))
        assert sizes.item() == hvd.size() == len(torch.distributed.get_process_group_ranks(None))


sampler = elastic.ElasticSampler(range(SAMPLES))
state = elastic.TorchState(network, optimizer, sampler=sampler, seen=[], epochs=[], is_done=False)
train(state)
flat = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
moments = [optimizer.state[parameter]["momentum_buffer"].tolist() for parameter in network.parameters()]
say(done=True, weights=flat.tolist(), moments=moments, epochs=state.epochs)
