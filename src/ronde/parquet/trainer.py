"""Trains a model on Parquet files, on the ranks of a job.

All ranks take the same number of steps in an epoch (`rows`). After each epoch rank 0 writes a checkpoint and the
metrics of all ranks into the folder of the run, and a run that finds checkpoints there continues after the newest one.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np
import torch

import ronde.torch as hvd
from ronde.data.parquet_files import ParquetReader, spans_of
from ronde.data.read_ahead import read_ahead
from ronde.errors import UsageError
from ronde.parquet.batches import batches, disjoint_range, equal_range, shuffle_groups
from ronde.parquet.objective import BatchObjective, Evaluation
from ronde.parquet.store import RunFolder
from ronde.parquet.training import DataIndex, EpochEnd, Training, load_training

__all__ = ["Trainer", "train_run"]

READ_AHEAD = 2  # batches: the present one, and the next one


def train_run(folder: RunFolder, digest: str) -> None:
    """Train what the folder of a run describes, as a rank of a job. All ranks call it. `digest`: of the training."""
    training, data = load_training(folder, digest)
    hvd.init()
    Trainer(training, data, folder).fit()
    hvd.shutdown()


class Trainer:
    """A rank's part in a training. All ranks make one, after `ronde.torch.init()`.

    Args:
        training: What is trained; the model and the optimizer change.
        data: The row groups, the same on every rank.
        folder: Where checkpoints and metrics are, the same on every rank.
    """

    def __init__(self, training: Training, data: DataIndex, folder: RunFolder) -> None:
        self._training, self._data, self._folder = training, data, folder
        self._device = _own_device(training.use_gpu)
        self._model = training.model.to(self._device)
        self._objective = BatchObjective(training, self._device)
        self._reader = ParquetReader(data.url, training.columns, folder.store.options)
        training.optimizer.load_state_dict(training.optimizer.state_dict())  # moves its state to the device
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        options = {"compression": training.compression} if training.compression is not None else {}
        self._optimizer = hvd.DistributedOptimizer(
            training.optimizer,
            named_parameters=self._model.named_parameters(),
            backward_passes_per_step=training.backward_passes_per_step,
            **options,
        )

    def fit(self) -> None:
        """Train until all epochs are complete, or a callback ends it. All ranks call it.

        Raises:
            UsageError: the columns do not fit the model or the losses, or the model's checkpoint does not fit it.
            StaleRoundError: another job writes into the folder of this run.
        """
        for epoch in range(self._resume(), self._training.epochs):
            began = time.monotonic()
            metrics: dict[str, Any] = {"epoch": epoch, "train": self._train(epoch)}
            if self._data.validation:
                metrics["validation"] = self._validate()
            metrics["seconds"] = round(time.monotonic() - began, 3)
            if hvd.rank() == 0:
                self._folder.add_epoch(epoch, self._save, metrics)
            end = EpochEnd(epoch, metrics, self._model, self._optimizer)
            stops = [callback(end) is True for callback in self._training.callbacks]
            if hvd.allreduce(torch.tensor(float(any(stops))), name="ronde.parquet.stop", op=hvd.Max):
                break

    # Checkpoints

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one, and return the number of the next epoch."""
        done = hvd.broadcast_object(self._folder.epochs() if hvd.rank() == 0 else None, root_rank=0)
        if not done:
            return 0
        state = self._folder.load_epoch(done[-1], self._device)
        try:
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"the checkpoint of epoch {done[-1]} in {self._folder.url} is of another model or optimizer. Give this "
                f"run another run_id, or the same model again: {error}"
            ) from error
        return int(done[-1]) + 1

    def _save(self, file: Any) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "output_sizes": self._objective.output_sizes,
        }
        torch.save(state, file)

    # Epochs

    def _train(self, epoch: int) -> dict[str, float]:
        training, rank = self._training, hvd.rank()
        seeds = [training.seed, epoch, rank]
        torch.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
        order = np.random.default_rng(seeds) if training.shuffle else None
        groups = (
            shuffle_groups(self._data.train, training.seed, epoch) if training.shuffle else self._data.train
        )
        rows = equal_range(sum(group.rows for group in groups), rank, hvd.size())
        steps = -(-len(rows) // training.batch_size)
        steps = min(steps, training.train_steps_per_epoch or steps)
        buffer_rows = training.shuffle_buffer_rows if training.shuffle else 0
        found = batches(spans_of(groups, rows), self._reader.read, training.batch_size, buffer_rows, order)
        self._model.train()
        sums = _Sums(self._objective)
        for step, columns in enumerate(read_ahead(islice(found, steps), READ_AHEAD), start=1):
            evaluation = self._objective.evaluate(columns)
            evaluation.loss.backward()
            if step % training.backward_passes_per_step == 0 or step == steps:
                self._optimizer.step()
                self._optimizer.zero_grad()
            sums.add(evaluation)
        return sums.averages("train")

    def _validate(self) -> dict[str, float]:
        training, groups = self._training, self._data.validation
        rows = disjoint_range(sum(group.rows for group in groups), hvd.rank(), hvd.size())
        batch_rows = training.val_batch_size or training.batch_size
        found = batches(spans_of(groups, rows), self._reader.read, batch_rows)
        self._model.eval()
        sums = _Sums(self._objective)
        with torch.no_grad():
            for columns in read_ahead(islice(found, training.validation_steps_per_epoch), READ_AHEAD):
                sums.add(self._objective.evaluate(columns))
        return sums.averages("validation")


class _Sums:
    """Adds up the loss and the metrics of batches; each row counts equally."""

    def __init__(self, objective: BatchObjective) -> None:
        self._names = ["loss", *objective.names]
        self._sums = torch.zeros(len(self._names) + 1, dtype=torch.float64)

    def add(self, evaluation: Evaluation) -> None:
        values = [torch.as_tensor(value).detach().cpu() for value in (evaluation.loss, *evaluation.metrics)]
        sums = [value.double() * evaluation.rows for value in values]
        self._sums = self._sums + torch.stack([*sums, torch.tensor(float(evaluation.rows))])

    def averages(self, name: str) -> dict[str, float]:
        """Return the averages over the rows of all ranks. All ranks call it."""
        *sums, rows = hvd.allreduce(self._sums, name=f"ronde.parquet.{name}", op=hvd.Sum).tolist()
        return {name: value / rows for name, value in zip(self._names, sums)}


def _own_device(use_gpu: bool) -> str:
    if not use_gpu or not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device
