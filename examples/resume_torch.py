"""Trains a small network on handwritten digits, saves checkpoints, and goes on from the last one after a failure.

    ronde run -n 2 --max-restarts 3 examples/resume_torch.py --checkpoints checkpoints/

Kill a worker while it runs, or the whole job, and start it again, also with another number of ranks: it continues where
it was. A checkpoint has all that the next step depends on: the parameters, the optimizer's state, and the number of
samples that all ranks have seen, from which the batches follow. On SIGTERM the job saves at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

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
    parser.add_argument("--samples", type=int, default=76_800, help="of all ranks, in the whole training")
    parser.add_argument("--every", type=int, default=6_400, help="samples from one checkpoint to the next")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    checkpoints = ronde.Checkpoints(options.checkpoints)
    seen = load(checkpoints, model, optimizer)
    # Every rank has read the same checkpoint, unless one looked a moment too early.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    seen = hvd.broadcast_object(seen, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    parts = train_test_split(images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    signals = noted_signals()
    while seen < options.samples:
        batch = batch_of(seen, len(train_x))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
        optimizer.step()
        before, seen = seen, seen + BATCH * hvd.size()
        # SIGTERM may have reached some of the ranks only: one is enough for all to save.
        leaving = bool(hvd.allreduce(torch.tensor(len(signals)), op=hvd.Max, name="leaving") > 0)
        if hvd.rank() == 0 and (leaving or seen // options.every > before // options.every):
            with checkpoints.writing(seen) as path:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            print(f"saved after {seen} samples", flush=True)
        if leaving:
            hvd.barrier()  # until rank 0 has saved
            if signals:
                sys.exit(128 + signal.SIGTERM)

    if hvd.rank() == 0:
        accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean()
        print(f"held-out accuracy: {accuracy:.4f}")


def load(checkpoints: ronde.Checkpoints, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint, if there is one; return the number of samples that the job has seen."""
    latest = checkpoints.latest()
    if latest is None:
        return 0
    saved = torch.load(latest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    seen = checkpoints.step_of(latest)
    if hvd.rank() == 0:
        print(f"going on after {seen} samples", flush=True)
    return seen


def noted_signals() -> list[int]:
    """Return a list to which each SIGTERM adds its number."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, note)
    return signals


def batch_of(seen: int, count: int) -> torch.Tensor:
    """Return which of `count` samples this rank takes in a step: its share of the next ones after those seen.

    The order follows from the epoch alone, so that another number of ranks sees the same samples.
    """
    numbers = np.arange(BATCH) + seen + BATCH * hvd.rank()
    orders = {epoch: np.random.default_rng(epoch).permutation(count) for epoch in set(numbers // count)}
    return torch.tensor([orders[number // count][number % count] for number in numbers])


if __name__ == "__main__":
    main()
