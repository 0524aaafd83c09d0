"""Reads handwritten digits in a job that survives the loss of its processes: plain NumPy, and `ronde.elastic`.

    ronde run -n 4 --min-np 1 --max-restarts 100 examples/elastic_digits.py

Kill a process with `kill -9` while it trains. The others keep their processes: they go back to the last commit and
go on, and the process that the launcher starts for the lost one gets the parameters from them.

What happens. `batches` cuts each global batch into pieces of 16 images, the same pieces whatever the number of
ranks, and gives each rank some of them. `batch.sum` adds the gradients of all pieces, exactly. So the parameters
have the same bits at the end, however many ranks there were, and whichever of them were lost.

The images are scikit-learn's bundled digits: 1,797 real ones of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

import ronde
import ronde.elastic

Array = npt.NDArray[Any]

WIDTHS = (64, 96, 10)  # pixels in, a hidden layer, one output per digit
HELD_OUT = 360  # images kept for the test


def load() -> tuple[Array, Array, Array, Array]:
    """Images [n, 64] and labels [n] for training; the same of the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 8 - 1, digits.target[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def start(seed: int) -> list[Array]:
    """The first parameters: of each layer the weights [inputs, outputs] and the bias [outputs]."""
    rng = np.random.default_rng(seed)
    layers = [
        (rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)), np.zeros(outputs))
        for inputs, outputs in itertools.pairwise(WIDTHS)
    ]
    return [array for layer in layers for array in layer]


def forward(parameters: list[Array], images: Array) -> tuple[Array, Array]:
    """The values of the hidden layer, and the probabilities [images, 10]."""
    weights, bias, last_weights, last_bias = parameters
    hidden = np.maximum(images @ weights + bias, 0)
    scores = hidden @ last_weights + last_bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradient(parameters: list[Array], images: Array, labels: Array) -> list[Array]:
    """The gradient of the loss, summed over these images."""
    hidden, delta = forward(parameters, images)
    delta[np.arange(len(labels)), labels] -= 1
    before = (delta @ parameters[2].T) * (hidden > 0)
    return [images.T @ before, before.sum(axis=0), hidden.T @ delta, delta.sum(axis=0)]


@ronde.elastic.run
def train(
    state: ronde.elastic.ObjectState, images: Array, labels: Array, options: argparse.Namespace
) -> None:
    """Train from the state on. After a loss or a change of the ranks this is called again."""
    data = (images, labels)
    for batch in state.batches(data, options.batch, epochs=options.epochs, seed=options.seed, micro_batch=16):
        total = batch.sum(lambda piece: gradient(state.parameters, *piece), like=state.parameters)
        for parameter, velocity, each in zip(state.parameters, state.velocities, total):
            velocity *= 0.9
            velocity += each / batch.samples
            parameter -= options.lr * velocity
        time.sleep(options.pause)
        state.commit()


def main() -> None:
    """Train, and read the images that were held out."""
    parser = argparse.ArgumentParser(description="Trains a small network on handwritten digits, elastically.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=128, help="images per step, over all ranks together")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and the order of images")
    parser.add_argument("--lr", type=float, default=0.05, help="the learning rate")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds to wait in each step, to watch losses"
    )
    options = parser.parse_args()
    images, labels, test_images, test_labels = load()
    parameters = start(options.seed)
    state = ronde.elastic.ObjectState(
        parameters=parameters, velocities=[np.zeros_like(each) for each in parameters]
    )
    train(state, images, labels, options)
    if ronde.rank() == 0:
        _, probabilities = forward(state.parameters, test_images)
        counters = ronde.elastic.goodput()
        bits = hashlib.sha256(b"".join(each.tobytes() for each in state.parameters)).hexdigest()
        print(f"parameters: {bits[:16]}")
        print(
            f"recoveries: {counters.recoveries}, changes: {counters.changes}, goodput: {counters.share:.1%}"
        )
        print(f"held-out accuracy: {(probabilities.argmax(axis=1) == test_labels).mean():.4f}", flush=True)
    ronde.shutdown()


if __name__ == "__main__":
    main()
