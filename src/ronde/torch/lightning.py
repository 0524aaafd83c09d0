"""Elastic training with Lightning's Trainer: a callback that commits, and the progress of `fit` as part of a state.

A loss ends `Trainer.fit`: its DDP module, loops and loader belong to the world that has lost a rank, and Lightning
takes them apart when an exception comes. So the training function makes a Trainer and calls `fit` in each world.
The processes, the module and the data stay, and the new `fit` goes on at the last committed step.

    import ronde.torch.elastic as elastic
    from ronde.torch.lightning import CommitSteps, FitProgress

    @elastic.run
    def train(state):
        trainer = lightning.Trainer(..., use_distributed_sampler=False, callbacks=[CommitSteps(state)])
        trainer.fit(module, DataLoader(data, 32, sampler=state.sampler))

    train(elastic.TorchState(module, sampler=elastic.ElasticSampler(data), progress=FitProgress()))

docs/elastic-training.md has the whole program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from ronde.errors import UsageError
from ronde.torch.elastic import ElasticSampler, TorchState
from ronde.torch.elastic.sampler import batch_size_of

__all__ = ["CommitSteps", "FitProgress"]


class FitProgress:
    """What `Trainer.fit` knows beside the module: the epoch, counts of steps, optimizers and schedulers.

    An attribute `progress` of a `TorchState`, which copies and restores it. `epoch`: the present one, from 0.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._trainer: Any = None  # whose loops, optimizers and schedulers are the live state
        self._received: dict[str, Any] = {}  # the state, while there is no trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the tensors of the optimizers themselves."""
        if self._trainer is None:
            return self._received
        steps = self._trainer.fit_loop.epoch_loop
        return {
            "epoch": self.epoch,
            "automatic": steps.automatic_optimization.optim_progress.state_dict(),
            "manual": steps.manual_optimization.optim_step_progress.state_dict(),
            "batches": steps._batches_that_stepped,
            "optimizers": [each.state_dict() for each in self._trainer.optimizers],
            "schedulers": [each.scheduler.state_dict() for each in self._trainer.lr_scheduler_configs],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep a state for the next `fit`."""
        self._trainer, self._received = None, dict(state_dict)
        self.epoch = self._received.get("epoch", 0)

    def begin_fit(self, trainer: Any) -> None:
        """Let a trainer, whose optimizers are there, go on from the state; it becomes the live one."""
        state, self._trainer, self._received = self.state_dict(), trainer, {}
        if not state:
            return
        steps = trainer.fit_loop.epoch_loop
        steps.automatic_optimization.optim_progress.load_state_dict(state["automatic"])
        steps.manual_optimization.optim_step_progress.load_state_dict(state["manual"])
        steps._batches_that_stepped = state["batches"]
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        for total in (trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current):
            total.ready = total.started = total.processed = total.completed = self.epoch


class CommitSteps(Callback):  # type: ignore[misc]  # Lightning's class is Any here
    """Commits a state after each step of the optimizers, and lets `fit` go on from the last commit.

    Give it to the Trainer that the training function makes. The Trainer has one training loader with the state's
    sampler, also in a `BatchSampler`, `use_distributed_sampler=False`, and no `limit_train_batches`. `fit` raises
    UsageError otherwise.

    Args:
        state: A `TorchState` with the module, an `ElasticSampler` as `sampler`, and a `FitProgress` as `progress`.
        every: The number of steps from one commit to the next; the end of an epoch commits, too (1).

    Raises:
        UsageError: The state lacks one of these, or `every` is less than 1.
    """

    def __init__(self, state: TorchState, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"every={every} is invalid: expected 1 or more")
        for name, kind in (("sampler", ElasticSampler), ("progress", FitProgress)):
            if not isinstance(getattr(state, name, None), kind):
                raise UsageError(f"the state needs an attribute {name!r} that is a {kind.__name__}")
        self._state, self._every = state, every
        self._committed = 0  # the step
        self._batch_size = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let `fit` count the batches of each epoch: the first one may have fewer than the others."""
        trainer.reload_dataloaders_every_n_epochs = 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on from the state."""
        limit = trainer.limit_train_batches
        if limit != 1.0 or isinstance(limit, int):  # 1.0 is all batches, and 1 is one, as with fast_dev_run
            raise UsageError(
                f"the Trainer's limit of {limit} training batches leaves samples of an epoch "
                "out: remove limit_train_batches, overfit_batches and fast_dev_run"
            )
        self._state.progress.begin_fit(trainer)
        self._committed = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Commit the end of the epoch before: with what schedulers and callbacks have done there."""
        self._batch_size = batch_size_of(trainer.train_dataloader, self._state.sampler)
        trainer.fit_loop.max_batches = len(
            trainer.train_dataloader
        )  # what is left of the first epoch may be less
        if trainer.current_epoch != self._state.progress.epoch:
            self._state.progress.epoch = trainer.current_epoch
            self._commit(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the samples; commit if the optimizers have made enough steps."""
        self._state.sampler.record_batch(batch_idx, self._batch_size)
        # After the last batch the epoch is not yet complete, and a new `fit` would find no samples.
        is_complete = trainer.global_step >= self._committed + self._every
        if is_complete and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._commit(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Deal the samples of the next epoch, which `fit` counts before it begins."""
        self._state.sampler.set_epoch(trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the end of the last epoch."""
        self._state.progress.epoch = trainer.current_epoch
        self._commit(trainer)

    def _commit(self, trainer: Any) -> None:
        self._committed = trainer.global_step
        self._state.commit()
