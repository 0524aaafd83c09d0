"""Reads handwritten digits: data-parallel training by PyTorch's DDP, over the backend "ronde" of torch.distributed.

    ronde run -n 2 examples/ddp_digits.py
    torchrun --nproc-per-node 2 examples/ddp_digits.py      # the same, started by torchrun

What happens. Every process ("rank") holds the whole network and draws its own part of the images. While a rank goes
backward through its layers, DDP averages the gradients of those that it has passed over all ranks.

Only two lines name Ronde: the import, which PyTorch 2.14 and later do not need, and the backend of the process group.

The images are scikit-learn's bundled digits: 1,797 real ones of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ronde.torch.distributed  # noqa: F401, makes the backend known

HELD_OUT = 360  # images kept for the test
EPOCHS = 40
BATCH = 128  # images of a step, over all ranks together


def load() -> tuple[Any, Any]:
    """Images [n, 1, 8, 8] and labels [n], in the same random order on all ranks."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.images)[order].float().unsqueeze(1)
    return (images - images.mean()) / images.std(), torch.from_numpy(digits.target)[order]


def train(model: Any, images: Any, labels: Any) -> None:
    """Trains the model on images and labels. Each rank draws an equal part of them."""
    data = TensorDataset(images, labels)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for chosen, answers in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(chosen), answers).backward()
            optimizer.step()
        schedule.step()


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
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(32 * 4 * 4, 10),
    )
    model = DistributedDataParallel(network)  # every rank gets the parameters of rank 0
    train(model, images[HELD_OUT:], labels[HELD_OUT:])
    result = accuracy(model.module.eval(), images[:HELD_OUT], labels[:HELD_OUT])
    if dist.get_rank() == 0:
        print(f"held-out accuracy: {result:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
