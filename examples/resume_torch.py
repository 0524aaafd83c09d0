"""Trains a small network on handwritten digits, saves checkpoints, and goes on from the last one after a failure.

    ronde run -n 2 --max-restarts 3 examples/resume_torch.py --checkpoints checkpoints/

Kill a worker while it runs, or the whole job, and start it again: it continues where it was. A checkpoint has all that
the next step depends on: the parameters, the optimizer's state, and the step, from which the batches follow.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ronde
import ronde.torch as hvd

BATCH = 64  # per rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints/", help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    checkpoints = ronde.Checkpoints(options.checkpoints)
    first = load(checkpoints, model, optimizer)
    # Every rank has read the same checkpoint, unless one looked a moment too early.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first = hvd.broadcast_object(first, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    parts = train_test_split(images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    for step in range(first, options.steps):
        batch = batch_of(step, len(train_x))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
        optimizer.step()
        if (step + 1) % options.every == 0 and hvd.rank() == 0:
            with checkpoints.writing(step) as path:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            print(f"saved step {step}", flush=True)

    if hvd.rank() == 0:
        accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean()
        print(f"held-out accuracy: {accuracy:.4f}")


def load(checkpoints: ronde.Checkpoints, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint, if there is one; return the first step that is still to be done."""
    latest = checkpoints.latest()
    if latest is None:
        return 0
    saved = torch.load(latest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = checkpoints.step_of(latest)
    if hvd.rank() == 0:
        print(f"going on after step {step}", flush=True)
    return step + 1


def batch_of(step: int, samples: int) -> torch.Tensor:
    """Return which samples this rank takes in a step: another part of one shuffled batch for each rank."""
    chosen = np.random.default_rng(step).choice(samples, BATCH * hvd.size(), replace=False)
    return torch.from_numpy(np.array_split(chosen, hvd.size())[hvd.rank()])


if __name__ == "__main__":
    main()
