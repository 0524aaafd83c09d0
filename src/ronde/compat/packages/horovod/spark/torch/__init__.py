"""`horovod.spark.torch`: the estimator of `ronde.spark`, and its model."""

from __future__ import annotations

from typing import Any

from ronde.errors import UnsupportedError
from ronde.spark.estimator.backend import EstimatorBackend
from ronde.spark.estimator.estimator import TorchEstimator as OurEstimator
from ronde.spark.estimator.model import TorchModel

from ..common.backend import SparkBackend  # noqa: TID252 - type checkers do not know a package horovod

__all__ = ["TorchEstimator", "TorchModel"]

# How Horovod reads data; Ronde reads row groups ahead in a thread.
WITHOUT_EFFECT = {
    "compress_sparse_cols",
    "inmemory_cache_all",
    "mp_start_method",
    "reader_pool_type",
    "train_reader_num_workers",
    "val_reader_num_workers",
}
UNSUPPORTED = {
    "loss_constructors": "give functions as loss",
    "train_minibatch_fn": "use ronde.spark.run with a training function",
    "transformation_edit_fields": "change the data frame, or the tensors in the model",
    "transformation_fn": "change the data frame, or the tensors in the model",
    "transformation_removed_fields": "leave the columns out of feature_cols and label_cols",
}


class TorchEstimator(OurEstimator):
    """`ronde.spark.TorchEstimator` with Horovod's parameters. In the ranks Ronde is Horovod.

    Parameters that say how Horovod reads data have no effect; those that have no equivalent raise UnsupportedError.
    """

    def __init__(self, **params: Any) -> None:
        given = {name: value for name, value in params.items() if value is not None}
        for name, remedy in UNSUPPORTED.items():
            if name in given:
                raise UnsupportedError(f"TorchEstimator({name}=...) is not supported by Ronde: {remedy}")
        super().__init__(**{name: value for name, value in given.items() if name not in WITHOUT_EFFECT})

    def fit_on_parquet(self, params: Any = None, dataset_idx: int | None = None) -> TorchModel:  # type: ignore[override]
        """Train on the Parquet files in the store's paths; return the model."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)  # type: ignore[no-any-return]
        store = self.getOrDefault("store")
        validation = store.get_val_data_path(dataset_idx)
        train = store.get_train_data_path(dataset_idx)
        return super().fit_on_parquet(train, validation if self.getOrDefault("validation") else None)

    def _backend(self) -> EstimatorBackend:
        given: EstimatorBackend | None = self.getOrDefault("backend")
        return given or SparkBackend(self.getOrDefault("num_proc"), verbose=self.getOrDefault("verbose"))
