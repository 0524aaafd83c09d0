"""Reads handwritten digits: training in PyTorch whose ranks may die, leave and come while it goes on.

    ronde run -n 4 --min-np 2 examples/elastic_torch_digits.py      # kill a worker while it runs
    ronde run -n 2 --spares 1 examples/elastic_torch_digits.py      # a spare takes the place of a dead worker at once

What happens. Each rank commits its state after every step: it copies the model, the optimizer and the place in the
epoch to its own memory. When a rank dies, the others keep their processes. They go back to the last commit, which is
the step before, deal the images that are left of the epoch among themselves, and go on. A new rank gets the state from
the others. Whatever happens, each image is in one step of each epoch.

What differs from training that is not elastic:

    hvd.elastic.TorchState(...)       holds everything that the next step depends on
    hvd.elastic.ElasticSampler(...)   deals the images that are left of the epoch
    @hvd.elastic.run                  calls `train` again after a change; so `train` begins from the state alone
    state.commit()                    after each step

The images are scikit-learn's bundled digits: 1,797 real ones of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde.torch as hvd

HELD_OUT = 360  # images kept for the test
BATCH = 32  # images of a step, per rank


def load() -> tuple[Any, Any]:
    """Images [n, 64] and labels [n], in the same random order on all ranks."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.data)[order].float() / 16, torch.from_numpy(digits.target)[order]


@hvd.elastic.run
def train(state: Any, data: TensorDataset, options: argparse.Namespace) -> None:
    """Trains until all epochs are done. It is called again after each change of the ranks."""
    print(f"rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}, from epoch {state.epoch}", flush=True)
    while state.epoch < options.epochs:
        loader: Any = DataLoader(data, BATCH, sampler=state.sampler)
        for number, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            nn.functional.cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.sampler.record_batch(number, BATCH)
            time.sleep(options.pause)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training images")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to sleep in each step, for experiments"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # one core per rank
    hvd.init()
    images, labels = load()
    data = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=4e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, total_iters=options.epochs)
    sampler = hvd.elastic.ElasticSampler(data)
    # All that the next step depends on. The ranks need not agree on it before: they get it from the first one.
    state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, epoch=0)
    train(state, data, options)

    model.eval()
    correct = (model(images[:HELD_OUT]).argmax(dim=1) == labels[:HELD_OUT]).float().mean()
    if hvd.rank() == 0:
        print(f"held-out accuracy: {correct:.4f}", flush=True)


if __name__ == "__main__":
    main()
