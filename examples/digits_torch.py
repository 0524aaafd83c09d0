"""Reads handwritten digits: data-parallel training of a small convolutional network, in PyTorch.

    python examples/digits_torch.py                # one process
    ronde run -n 2 examples/digits_torch.py        # two processes, the same training

What happens. Every process ("rank") runs this same program and holds the same network. For each step all ranks draw
the same global batch, because they draw it from the same seed, and each takes its own part of it. While a rank goes
backward through its layers, the gradients of those it has passed are already summed over all ranks; then every rank
makes the same update. Whatever the number of ranks, only rounding differs.

What this needs from Ronde (the names are those of horovod.torch):

    hvd.init()                        joins the other ranks; without `ronde run` the world is this one process
    hvd.broadcast_parameters(...)     gives every rank the parameters of rank 0
    hvd.DistributedOptimizer(...)     the optimizer, with gradients of all ranks: by hooks, while backward() runs
    hvd.allreduce_async(...)          any other tensor's sum over all ranks, in the background
    hvd.rank(), hvd.size()            this process's number, and how many there are

The images are scikit-learn's bundled digits: 1,797 real ones of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import ronde.torch as hvd

HELD_OUT = 360  # images kept for the test


def load() -> tuple[Any, Any, Any, Any]:
    """Training images [9, n, 1, 8, 8] (as they are and shifted by a pixel), labels [n]; the same of the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=generator(0))  # the same split in every run
    images = torch.from_numpy(digits.images)[order].float().unsqueeze(1)
    labels = torch.from_numpy(digits.target)[order]
    images = (images - images[HELD_OUT:].mean()) / images[HELD_OUT:].std()
    padded = nn.functional.pad(images[HELD_OUT:], (1, 1, 1, 1), mode="replicate")
    shifted = [padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return torch.stack(shifted), labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def generator(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def network(seed: int) -> Any:
    """Two convolutions, then two full layers: 38,282 parameters.

    All of it is smooth. Where ReLU or a maximum switches, different rounding may send training down another path.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


def batches(images: int, batch: int, epochs: int, seed: int) -> Iterator[Any]:
    """Global batches: indices [batch] into the shifted images, the same on all ranks."""
    source = generator(seed)
    for _ in range(epochs):
        shifts = torch.randint(9, (images,), generator=source)
        chosen = shifts * images + torch.randperm(images, generator=source)
        for start in range(0, images - batch + 1, batch):
            yield chosen[start : start + batch]


def my_part(x: Any) -> Any:
    """This rank's part of a sequence that all ranks have."""
    return torch.tensor_split(x, hvd.size())[hvd.rank()]


class Lines:
    """Standard output for a progress bar in a log: a new line each time, nothing to overwrite."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), flush=True)

    def flush(self) -> None:
        sys.stdout.flush()


def progress_bar(steps: int, shown: bool) -> tqdm[Any]:
    """A bar that redraws itself on a terminal and writes some ten lines into a log."""
    if sys.stdout.isatty():
        return tqdm(total=steps, unit="step", file=sys.stdout, disable=not shown)
    every = steps // 10 + 1
    return tqdm(total=steps, unit="step", file=Lines(), disable=not shown, ncols=90, miniters=every,
                mininterval=0, maxinterval=float("inf"))  # fmt: skip


def train(options: argparse.Namespace, model: Any, images: Any, labels: Any) -> tuple[list[float], Any]:
    """Trains the model; returns the loss of every step, and seconds [steps, 2]: all, and waiting for other ranks."""
    # The same seed starts every rank alike; a start that only rank 0 has read from a file needs this line.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    # Each rank's loss is its part of the batch's, so their gradients are to be summed. (With the mean over its own
    # images, as usual, it would be op=hvd.Average; that weighs images differently where parts have different sizes.)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
    all_steps = options.epochs * (len(labels) // options.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=all_steps)

    steps = min(all_steps, options.steps or all_steps)
    losses, seconds = [], torch.zeros(steps, 2, dtype=torch.float64)
    draws = batches(len(labels), options.batch, options.epochs, options.seed)
    flat_images = images.flatten(0, 1)
    with progress_bar(steps, shown=hvd.rank() == 0) as bar:
        for step, chosen in enumerate(itertools.islice(draws, steps)):
            began = time.perf_counter()
            mine = my_part(chosen)
            scores = model(flat_images[mine])
            loss = (
                nn.functional.cross_entropy(scores, labels[mine % len(labels)], reduction="sum")
                / options.batch
            )
            total = hvd.allreduce_async(loss.detach().double(), name="loss", op=hvd.Sum)
            optimizer.zero_grad()
            loss.backward()
            computed = time.perf_counter()
            optimizer.synchronize()  # waits for gradients that are still on their way
            losses.append(hvd.synchronize(total).item())
            waited = time.perf_counter() - computed
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
            seconds[step, 0], seconds[step, 1] = time.perf_counter() - began, waited
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            bar.update()
    return losses, seconds


def are_equal(model: Any) -> bool:
    """Whether all ranks have the same parameters, to the last bit."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
    of_all_ranks = hvd.allgather(mine[None])  # [ranks, parameters]
    return bool((of_all_ranks == of_all_ranks[0]).all())


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images read correctly; every rank reads its part of them."""
    with torch.no_grad():
        correct = (model(my_part(images)).argmax(dim=1) == my_part(labels)).sum()
    return float(hvd.allreduce(correct, op=hvd.Sum) / len(labels))


def plot(path: pathlib.Path, losses: list[float], throughput: Any) -> None:
    """Draws the loss and the images per second of every step; the latter as a running mean over 20."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    above.semilogy(losses, linewidth=0.8)
    above.set_ylabel("loss")
    below.plot(throughput, color="lightgrey", linewidth=0.8)
    below.plot(throughput.unfold(0, min(20, len(throughput)), 1).mean(dim=1))
    below.set(xlabel="step", ylabel="images per second", ylim=(0, None))
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small convolutional network on handwritten digits."
    )
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=128, help="images per step, over all ranks together")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and the order of images")
    parser.add_argument("--lr", type=float, default=0.1, help="the learning rate; falls to 0 step by step")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw loss and throughput")
    parser.add_argument(
        "--losses", type=pathlib.Path, metavar="FILE", help="write every step's loss, one a line"
    )
    options = parser.parse_args()
    if min(options.epochs, options.batch, options.steps or 1) < 1 or options.steps == 0:
        parser.error("--epochs, --batch and --steps must be at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)  # one core per rank
    images, labels, test_images, test_labels = load()
    if options.batch > len(labels):
        sys.exit(f"--batch {options.batch} is more than the {len(labels)} training images")
    hvd.init()
    model = network(options.seed)
    losses, seconds = train(options, model, images, labels)
    if not are_equal(model):
        sys.exit("the ranks' parameters differ")
    result = accuracy(model, test_images, test_labels)

    if hvd.rank() == 0:
        if options.losses:
            options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        if options.plot:
            plot(options.plot, losses, options.batch / seconds[:, 0])
        total, waiting = seconds.sum(dim=0).tolist()
        print(f"ranks: {hvd.size()}, their parameters bitwise equal")
        print(f"images per second: {len(losses) * options.batch / total:,.0f}")
        print(f"time waiting for communication: {waiting / total:.1%}")
        print(f"held-out accuracy: {result:.4f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
