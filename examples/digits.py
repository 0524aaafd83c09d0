"""Reads handwritten digits: data-parallel training of a small network, in plain NumPy.

    python examples/digits.py                # one process
    ronde run -n 2 examples/digits.py        # two processes, the same training

What happens. Every process ("rank") runs this same program and holds the same parameters. For each step all
ranks draw the same global batch, because they draw it from the same seed. Each takes its own part of it and
computes the gradient of the loss over that part. One all-reduce sums the parts, so that every rank holds the
gradient of the whole batch and makes the same update. Whatever the number of ranks, only rounding differs.

What this needs from Ronde:

    ronde.init()                  joins the other ranks; without `ronde run` the world is this one process
    world = ronde.world()         the communicator of all ranks, with world.rank and world.size
    world.empty(shape, dtype)     a NumPy array in memory that this machine's ranks share: what is written
                                  there is summed where it lies, which costs less than one copy
    world.allreduce(x, out=x)     the sum over all ranks, on every rank; also broadcast, allgather and others

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

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits
from tqdm import tqdm

import ronde

Array = npt.NDArray[Any]
Layers = list[tuple[Array, Array]]  # of each layer: weights [inputs, outputs] and bias [outputs]

WIDTHS = (64, 256, 128, 10)  # pixels in, two hidden layers, one output per digit
PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(WIDTHS))
HELD_OUT = 360  # images kept for the test


def load() -> tuple[Array, Array, Array, Array]:
    """Training images [9, n, 64] (as they are and shifted by a pixel), labels [n]; the same of the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # the same split in every run
    images, labels = digits.images[order], digits.target[order]
    images = (images - images[HELD_OUT:].mean()) / images[HELD_OUT:].std()
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")[HELD_OUT:]
    shifted = [padded[:, y : y + 8, x : x + 8].reshape(-1, 64) for y in range(3) for x in range(3)]
    return np.stack(shifted), labels[HELD_OUT:], images[:HELD_OUT].reshape(-1, 64), labels[:HELD_OUT]


def layers_of(flat: Array) -> Layers:
    """Views of one flat vector [PARAMETERS] as the layers' weights and biases; no bytes are copied."""
    layers, start = [], 0
    for inputs, outputs in itertools.pairwise(WIDTHS):
        middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
        layers.append((flat[start:middle].reshape(inputs, outputs), flat[middle:end]))
        start = end
    return layers


def forward(layers: Layers, images: Array) -> tuple[list[Array], Array]:
    """The input of every layer, and the logarithms of the probabilities [images, 10]."""
    inputs = [images]
    for weights, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weights + bias, 0))
    weights, bias = layers[-1]
    scores = inputs[-1] @ weights + bias
    scores -= scores.max(axis=1, keepdims=True)
    return inputs, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def backward(layers: Layers, gradients: Layers, images: Array, labels: Array, batch: int) -> float:
    """Writes this rank's share of the gradient into `gradients` and returns its share of the loss.

    Both are sums over this rank's images, divided by the size of the *global* batch: so the sum over ranks is
    the mean over the batch, whether the parts have different sizes or are empty.
    """
    inputs, log_probabilities = forward(layers, images)
    rows = np.arange(len(labels))
    delta = np.exp(log_probabilities)
    delta[rows, labels] -= 1
    delta /= batch
    for layer in reversed(range(len(layers))):
        np.matmul(inputs[layer].T, delta, out=gradients[layer][0])
        np.sum(delta, axis=0, out=gradients[layer][1])
        delta = (delta @ layers[layer][0].T) * (inputs[layer] > 0)
    return float(-log_probabilities[rows, labels].sum() / batch)


def batches(images: int, batch: int, epochs: int, seed: int) -> Iterator[Array]:
    """Global batches: indices [batch] into the shifted images, the same on all ranks."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        chosen = rng.integers(9, size=images) * images + rng.permutation(images)
        for start in range(0, images - batch + 1, batch):
            yield chosen[start : start + batch]


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


def train(
    options: argparse.Namespace, world: Any, images: Array, labels: Array
) -> tuple[Array, list[float], Array]:
    """The parameters [PARAMETERS], the loss of every step, and seconds [steps, 2]: all, and communicating."""
    rng = np.random.default_rng(options.seed)
    parameters = np.zeros(PARAMETERS)
    layers = layers_of(parameters)
    for weights, _ in layers:
        weights[:] = rng.normal(0, np.sqrt(2 / len(weights)), weights.shape)
    # The same seed starts every rank alike; a start that only rank 0 has read from a file needs this line.
    world.broadcast(parameters, root=0, out=parameters)

    # All gradients in one symmetric buffer, and the loss behind them: one call per step moves everything.
    shared = world.empty(PARAMETERS + 1, np.float64)
    gradient, gradients = shared[:-1], layers_of(shared)
    velocity = np.zeros(PARAMETERS)

    all_steps = options.epochs * (len(labels) // options.batch)
    steps = min(all_steps, options.steps or all_steps)
    losses, seconds = [], np.zeros((steps, 2))
    draws = batches(len(labels), options.batch, options.epochs, options.seed)
    flat_images = images.reshape(-1, 64)
    with progress_bar(steps, shown=world.rank == 0) as bar:
        for step, chosen in enumerate(itertools.islice(draws, steps)):
            began = time.perf_counter()
            mine = np.array_split(chosen, world.size)[world.rank]
            mine_labels = labels[mine % len(labels)]
            shared[-1] = backward(layers, gradients, flat_images[mine], mine_labels, options.batch)
            computed = time.perf_counter()
            world.allreduce(shared, out=shared)  # the first rank to arrive waits here for the others
            communicated = time.perf_counter()
            velocity *= 0.9
            velocity += gradient
            parameters -= options.lr * (1 - step / all_steps) * velocity
            losses.append(float(shared[-1]))
            seconds[step] = time.perf_counter() - began, communicated - computed
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            bar.update()
    return parameters, losses, seconds


def accuracy(world: Any, parameters: Array, images: Array, labels: Array) -> float:
    """The share of images read correctly; every rank reads its part of them."""
    mine = np.array_split(np.arange(len(labels)), world.size)[world.rank]
    _, log_probabilities = forward(layers_of(parameters), images[mine])
    correct = np.array([(log_probabilities.argmax(axis=1) == labels[mine]).sum()])
    return float(world.allreduce(correct)[0] / len(labels))


def plot(path: pathlib.Path, losses: list[float], throughput: Array) -> None:
    """Draws the loss and the images per second of every step; the latter as a running mean over 20."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    above.semilogy(losses, linewidth=0.8)
    above.set_ylabel("loss")
    below.plot(throughput, color="lightgrey", linewidth=0.8)
    below.plot(np.convolve(throughput, np.ones(20) / 20, mode="valid"))
    below.set(xlabel="step", ylabel="images per second", ylim=(0, None))
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=150, help="passes over the training images")
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
    images, labels, test_images, test_labels = load()
    if options.batch > len(labels):
        sys.exit(f"--batch {options.batch} is more than the {len(labels)} training images")
    ronde.init()
    world = ronde.world()
    parameters, losses, seconds = train(options, world, images, labels)

    # Nothing may tell the ranks apart now, not even the last bit of one parameter.
    of_all_ranks = world.allgather(parameters.view(np.int64)[None])  # [ranks, PARAMETERS]
    if (of_all_ranks != of_all_ranks[0]).any():
        sys.exit("the ranks' parameters differ")
    result = accuracy(world, parameters, test_images, test_labels)

    if world.rank == 0:
        if options.losses:
            options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        if options.plot:
            plot(options.plot, losses, options.batch / seconds[:, 0])
        total, communicating = seconds.sum(axis=0)
        print(f"ranks: {world.size}, their parameters bitwise equal")
        print(f"images per second: {len(losses) * options.batch / total:,.0f}")
        print(f"time in communication: {communicating / total:.1%}")
        print(f"held-out accuracy: {result:.4f}", flush=True)
    ronde.shutdown()


if __name__ == "__main__":
    main()
