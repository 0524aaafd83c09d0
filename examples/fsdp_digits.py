"""Reads handwritten digits: training with sharded parameters by PyTorch's FSDP2, over the backend "ronde".

    ronde run -n 2 examples/fsdp_digits.py
    torchrun --nproc-per-node 2 examples/fsdp_digits.py     # the same, started by torchrun

What happens. Every process ("rank") keeps only its share of each parameter, of its gradient and of the optimizer's
state. Before a layer computes, the ranks gather its parameters; after its backward pass, they average its gradients,
and each rank keeps its share. So n ranks train a model that needs n times the memory of one.

Only two lines name Ronde: the import, which PyTorch 2.14 and later do not need, and the backend of the process group.
FSDP2 (`fully_shard`) is in PyTorch 2.6 and later.

The images are scikit-learn's bundled digits: 1,797 real ones of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ronde.torch.distributed  # noqa: F401, makes the backend known

HELD_OUT = 360  # images kept for the test
EPOCHS = 40
BATCH = 128  # images of a step, over all ranks together


class Block(nn.Module):  # type: ignore[misc]
    """A layer whose result is added to its input: the unit of which FSDP2 gathers the parameters at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Any) -> Any:
        return x + self.layers(x)


def load() -> tuple[Any, Any]:
    """Images [n, 64] and labels [n], in the same random order on all ranks."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.data)[order].float()
    return (images - images.mean()) / images.std(), torch.from_numpy(digits.target)[order]


def sharded(model: Any) -> Any:
    """The same model, with each block's parameters in equal shares on the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # has the backend of the process group
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, images: Any, labels: Any) -> None:
    """Trains the model on images and labels. All ranks draw the same batch, and each takes its part of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # its state is sharded, like the parameters
    source = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=source).split(BATCH):
            mine = batch[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()


def accuracy(model: Any, images: Any, labels: Any) -> float:
    """The share of images read correctly; every rank reads its part of them."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    dist.all_reduce(correct)
    return float(correct) / len(labels)


def main() -> None:
    torch.set_num_threads(1)  # one core per rank
    dist.init_process_group("ronde")
    images, labels = load()
    torch.manual_seed(0)  # the same first parameters on all ranks
    width = 256
    model = sharded(nn.Sequential(nn.Linear(64, width), Block(width), Block(width), nn.Linear(width, 10)))
    train(model, images[HELD_OUT:], labels[HELD_OUT:])
    result = accuracy(model.eval(), images[:HELD_OUT], labels[:HELD_OUT])
    if dist.get_rank() == 0:
        print(f"held-out accuracy: {result:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
