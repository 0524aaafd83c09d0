"""The models of the benchmarks, and their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Shape = tuple[int, ...]

BATCHES = 8  # different ones, again and again


def resnet50_shapes() -> list[Shape]:
    """The 161 parameter tensors of torchvision's ResNet-50 in its order: 25,557,032 numbers, 102 MB as float32."""

    def convolution(inputs: int, outputs: int, width: int) -> list[Shape]:
        return [(outputs, inputs, width, width), (outputs,), (outputs,)]  # with its batch normalization

    shapes = convolution(3, 64, 7)
    inputs = 64
    for blocks, planes in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            outputs = 4 * planes
            shapes += convolution(inputs, planes, 1) + convolution(planes, planes, 3)
            shapes += convolution(planes, outputs, 1)
            if block == 0:
                shapes += convolution(inputs, outputs, 1)  # so that the shortcut fits
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def small_shapes(count: int = 1000) -> list[Shape]:
    """So many tensors of 64 bytes."""
    return [(16,)] * count


class Transformer(nn.Module):  # type: ignore[misc]
    """Eight layers with causal attention over a vocabulary of 32,768: 50.4 million parameters, 202 MB as float32."""

    vocabulary = 32_768

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, 512)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 3_072, dropout=0.0, batch_first=True) for _ in range(8)
        )
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class SumOfSums(nn.Module):  # type: ignore[misc]
    """Has parameters of the shapes and next to nothing to compute: every gradient is `factor` in all its elements."""

    def __init__(self, shapes: list[Shape], factor: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.factor = factor

    def forward(self) -> Any:
        return torch.stack([weight.sum() for weight in self.weights]).sum() * self.factor


def cnn() -> Any:
    """A small convolutional network: half a million parameters (2 MB)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mlp() -> Any:
    """More parameters than a small batch gives work: 5.3 million (21 MB)."""
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise((512, 2048, 2048)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def batches(shape: Shape, rank: int) -> Iterator[tuple[Any, Any]]:
    """Random inputs of the shape and labels without end, other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [
        (torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator))
        for _ in range(BATCHES)
    ]
    return itertools.cycle(drawn)
