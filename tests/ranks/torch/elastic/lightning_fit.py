"""Trains by Lightning's Trainer for `test_lightning`. The argument: a file to make when rank 1 is killed, or ""."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

import ronde.torch as hvd
import ronde.torch.distributed  # noqa: F401 (registers the backend)
import ronde.torch.elastic as elastic
from ronde.torch.lightning import CommitSteps, FitProgress

SAMPLES, BATCH, EPOCHS, DIES_AT = 64, 4, 3, 11


class Sums(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
        self.register_buffer("seen", torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64))

    def training_step(self, batch: Any, index: int) -> Any:
        if KILLED and self.trainer.global_step == DIES_AT and hvd.rank() == 1:
            die_once()
        x, numbers = batch
        self.seen[self.trainer.current_epoch] += (
            self.all_gather(numbers).flatten().bincount(minlength=SAMPLES)
        )
        loss = (self.layer(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Batches(lightning.LightningDataModule):  # type: ignore[misc]
    """The batches of the plain loader, made by a batch sampler."""

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler

    def train_dataloader(self) -> Any:
        batches = torch.utils.data.BatchSampler(self.sampler, BATCH, drop_last=False)
        return torch.utils.data.DataLoader(DATA, batch_sampler=batches)


def die_once() -> None:
    try:
        open(KILLED, "x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@elastic.run
def train(state: Any) -> int:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=hvd.local_size(),
        num_nodes=hvd.size() // hvd.local_size(),
        strategy=DDPStrategy(process_group_backend="ronde", cluster_environment=TorchElasticEnvironment()),
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        callbacks=[CommitSteps(state)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if KILLED:
        trainer.fit(state.model, datamodule=Batches(state.sampler))
    else:
        trainer.fit(state.model, torch.utils.data.DataLoader(DATA, BATCH, sampler=state.sampler))
    return int(trainer.global_step)


KILLED = sys.argv[1]
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(samples, torch.arange(SAMPLES))
module = Sums()
steps = train(elastic.TorchState(module, sampler=elastic.ElasticSampler(DATA), progress=FitProgress()))
weights = [each.hex() for each in module.layer.weight.flatten().tolist()]
print("result", json.dumps([hvd.size(), steps, module.seen.tolist(), weights]), flush=True)
