"""Training from Parquet files, by the ranks of any job; `ronde.spark.TorchEstimator` writes them and starts it.

    training = Training(model, optimizer, [loss], ["features"], ["label"], epochs=3)
    history = fit_on_parquet(training, "train/", "validation/", store=RunStore("runs/"), run_id="first")

All ranks of a job call that, such as `ronde run -n 4 train.py`.
"""

from __future__ import annotations

from typing import Any

from ronde.parquet.store import RunStore
from ronde.parquet.training import EpochEnd, Training

__all__ = ["EpochEnd", "RunStore", "Training", "fit_on_parquet"]


def fit_on_parquet(
    training: Training, train: str, validation: str | None = None, *, store: RunStore, run_id: str
) -> list[dict[str, Any]]:
    """Train on the Parquet files of a folder; return the metrics of every epoch.

    All ranks call it, with equal arguments. The run continues after its newest checkpoint, if it has one.
    `training.model` is the trained model in the end.

    Args:
        training: What is trained.
        train: A folder's path or URL, in a file system that all ranks share.
        validation: The folder with the data for validation, in the same file system (default: no validation).
        store: Where the run keeps its checkpoints.
        run_id: The name of the run in the store.

    Raises:
        UsageError: A folder has no Parquet file, or a column does not exist or does not fit the model.
        StaleRoundError: Another job has written into the same run.
    """
    import ronde.torch as hvd
    from ronde.parquet.trainer import Trainer
    from ronde.parquet.training import index_data

    hvd.init()
    folder = store.run(run_id)
    data = hvd.broadcast_object(
        index_data(train, validation, training.columns, store.options) if hvd.rank() == 0 else None,
        root_rank=0,
    )
    Trainer(training, data, folder).fit()
    hvd.barrier()
    return [folder.metrics(epoch) for epoch in folder.epochs()]
