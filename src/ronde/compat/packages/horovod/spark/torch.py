"""`horovod.spark.torch`: the estimator and the model of `ronde.spark`, with Horovod's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from ronde.errors import UnsupportedError
from ronde.spark.ml_params import EstimatorParams, ModelParams  # noqa: F401 - for add_modules
from ronde.spark.torch_estimator import EstimatorBackend
from ronde.spark.torch_estimator import TorchEstimator as OurEstimator
from ronde.spark.torch_model import TorchModel as OurModel

from .. import add_modules  # noqa: TID252 - type checkers do not know a package horovod
from .common import SparkBackend

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


class TorchModel(OurModel):
    """`ronde.spark.TorchModel` with Horovod's names, such as `feature_columns` for `feature_cols`.

    `optimizer`, `loss`, `loss_constructors` and `_metadata` have no effect. `transform` finds out which columns get
    numbers and which vectors; for a model that the estimator has not trained, it calls the module for one row first.
    """

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]] | None = None,
        model: Any = None,
        feature_columns: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_columns: Sequence[str] | None = None,
        optimizer: Any = None,
        run_id: str | None = None,
        _metadata: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
        **params: Any,
    ) -> None:
        named = {"feature_cols": feature_columns, "label_cols": label_columns, "input_shapes": input_shapes}
        super().__init__(**{**named, "model": model, "run_id": run_id, **params})
        self.setHistory(history or ())

    def setHistory(self, value: Sequence[Mapping[str, Any]]) -> TorchModel:  # noqa: N802 - Horovod's name
        """Set the metrics of each epoch; return this object."""
        self.history = [dict(epoch) for epoch in value]
        return self

    def getFeatureColumns(self) -> list[str]:  # noqa: N802
        """Return the columns that the module gets."""
        return list(self.getOrDefault("feature_cols"))

    def setFeatureColumns(self, value: Sequence[str]) -> TorchModel:  # noqa: N802
        """Set the columns that the module gets; return this object."""
        self._set(feature_cols=list(value))
        return self

    def getLabelColumns(self) -> list[str]:  # noqa: N802
        """Return the columns for which the module was trained."""
        return list(self.getOrDefault("label_cols"))

    def setLabelColumns(self, value: Sequence[str]) -> TorchModel:  # noqa: N802
        """Set the columns for which the module was trained; return this object."""
        self._set(label_cols=list(value))
        return self

    setLabelColoumns = setLabelColumns  # noqa: N815 - as Horovod spells it

    def _transform(self, dataset: DataFrame) -> DataFrame:
        if not self.output_sizes:
            outputs = self.getOutputCols()
            row = super()._transform(dataset.limit(1)).select(*outputs).first()
            if row is not None:
                self.output_sizes = [len(row[name]) for name in outputs]
        return super()._transform(dataset)


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
        model = super().fit_on_parquet(train, validation if self.getOrDefault("validation") else None)
        assert isinstance(model, TorchModel)
        return model

    def _new_model(self, **params: Any) -> TorchModel:
        return TorchModel(**params)

    def _backend(self) -> EstimatorBackend:
        given: EstimatorBackend | None = self.getOrDefault("backend")
        return given or SparkBackend(self.getOrDefault("num_proc"), verbose=self.getOrDefault("verbose"))


add_modules(__name__, estimator=["EstimatorParams", "ModelParams", "TorchEstimator", "TorchModel"])
