"""Trains a sharded model (FSDP2) for `test_shards`; if an argument names a file to make, rank 1 is killed once."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ronde.torch.distributed  # noqa: F401 (registers the backend)
import ronde.torch.elastic as elastic

STEP = 10


def main() -> None:
    dist.init_process_group("ronde")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(640, 10, generator=torch.Generator().manual_seed(0))

    @elastic.run
    def train(state: Any) -> None:
        for x in state.batches(data.numpy(), global_batch=32, epochs=2):
            samples = torch.from_numpy(x)
            loss = (model(samples) - samples.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.commit()
            if len(sys.argv) > 1 and state.commit_number == STEP and dist.get_rank() == 1:
                try:
                    open(sys.argv[1], "x").close()
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    train(elastic.TorchState(model=model, optimizer=optimizer))
    parameters = [each.full_tensor().detach().double().sum().item() for each in model.parameters()]
    print("parameters", sum(parameters).hex())


if __name__ == "__main__":
    main()
