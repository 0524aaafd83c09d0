"""A trained PyTorch model as a Spark ML model, whose `transform` adds columns with its outputs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param.shared import HasOutputCols
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from ronde.data.needs import need
from ronde.errors import UsageError
from ronde.parquet.objective import float_dtype, predict, to_tensor
from ronde.parquet.training import reshaped, rows_at_once
from ronde.spark.columns import as_arrays
from ronde.spark.ml_params import ModelParams, ObjectsReader, ObjectsWriter, check_names

__all__ = ["TorchModel"]


class TorchModel(Model, ModelParams, HasOutputCols, MLReadable, MLWritable):  # type: ignore[misc]
    """A PyTorch module that adds the columns of its outputs to a data frame.

        predicted = model.setOutputCols(["prediction"]).transform(frame)

    An output with one value for each row becomes a double, any other one a Spark vector.

    Args:
        model: The module.
        feature_cols: The columns that it gets, a tensor each.
        label_cols: The columns for which it was trained, one for each output.
        output_cols: The columns that `transform` adds (default: those of `label_cols` with `__output` behind).
        input_shapes: The shape of the tensor of each feature column, with -1 for the rows, or that of a whole batch,
            which the module then gets at a time (default: as in the frame).
        run_id: The run that has trained it.

    Attributes:
        history: The metrics of each epoch: `epoch`, `train`, perhaps `validation`, and `seconds`.
        output_sizes: The number of values of each output for a row; an output without a number here is a vector.

    Raises:
        UsageError: A name is not a parameter.
        TypeError: A value has the wrong type.
    """

    __module__ = "ronde.spark"  # so the metadata of a saved model name the class by its public place
    saved_attributes = ("history", "output_sizes")

    def __init__(self, *, output_cols: Sequence[str] | None = None, **params: Any) -> None:
        super().__init__()
        check_names(self, params)
        self._setDefault(input_shapes=None, run_id=None)
        self._set(**{name: value for name, value in params.items() if value is not None})
        if output_cols is not None:
            self.setOutputCols(output_cols)
        self.history: list[dict[str, Any]] = []
        self.output_sizes: list[int] = []

    def setOutputCols(self, value: Sequence[str]) -> TorchModel:  # noqa: N802 - Spark's name
        """Set the columns that `transform` adds; return this object. Raises nothing.

        Args:
            value: The names, one for each output of the module. `transform` raises UsageError for another number.
        """
        model: TorchModel = self._set(outputCols=list(value))
        return model

    def getOutputCols(self) -> list[str]:  # noqa: N802 - Spark's name
        """Return the names of the columns that `transform` adds.

        Raises:
            KeyError: Neither `output_cols` nor `label_cols` is set.
        """
        if self.isSet("outputCols"):
            return list(self.getOrDefault("outputCols"))
        return [f"{name}__output" for name in self.getOrDefault("label_cols")]

    def getHistory(self) -> list[dict[str, Any]]:  # noqa: N802 - Horovod's name
        """Return the metrics of each epoch, as the attribute `history`. Raises nothing."""
        return self.history

    def write(self) -> ObjectsWriter:
        """Return what writes this model: `model.write().overwrite().save(path)`. Raises nothing."""
        return ObjectsWriter(self)

    @classmethod
    def read(cls) -> ObjectsReader:
        """Return what reads a model: `TorchModel.read().load(path)`. Loading runs code in the files. Raises nothing."""
        return ObjectsReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        names = list(self.getOrDefault("feature_cols"))
        columns, outputs = as_arrays(dataset, names), self.getOutputCols()
        sizes = self.output_sizes or [0] * len(outputs)
        if len(sizes) != len(outputs):
            raise UsageError(f"output_cols={outputs} are invalid: the model has {len(sizes)} outputs")
        content = need("cloudpickle", extra="spark-estimator").dumps(self.getOrDefault("model").cpu())
        found = _function(content, self.getOrDefault("input_shapes"), len(outputs))(*columns.values())
        for number, (name, size) in enumerate(zip(outputs, sizes)):
            dataset = dataset.withColumn(name, _as_column(found.getField(f"output_{number}"), size))
        return dataset


def _as_column(output: Column, size: int) -> Column:
    return output.getItem(0) if size == 1 else array_to_vector(output)


def _function(content: bytes, shapes: Sequence[Sequence[int]] | None, outputs: int) -> Callable[..., Column]:
    """Return a pandas UDF from feature columns to a struct with an array for each output."""
    pandas = need("pandas", extra="spark-estimator")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        yield from predict_batches(pickle.loads(content), batches, shapes, outputs)

    # Spark reads the types when it makes the function; as text it could not find pandas.
    iterator: Any = Iterator
    many: Any = tuple
    run.__annotations__ = {
        "batches": iterator[many[pandas.Series, ...]],
        "return": iterator[pandas.DataFrame],
    }
    fields = ", ".join(f"output_{number} array<double>" for number in range(outputs))
    made: Callable[..., Column] = F.pandas_udf(run, fields)
    return made


def predict_batches(
    model: Any, batches: Iterator[Any], shapes: Sequence[Sequence[int]] | None, outputs: int
) -> Iterator[Any]:
    """Yield for each batch a data frame with a column of arrays for each output.

    A batch is a tuple of series, one for each feature column, or the series of a single one.
    """
    import pandas

    dtype = float_dtype(model)
    model.eval()
    names = [f"output_{number}" for number in range(outputs)]
    for batch in batches:
        series = batch if isinstance(batch, tuple) else (batch,)  # Spark gives a single column as it is
        if not len(series[0]):
            yield pandas.DataFrame({name: pandas.Series([], dtype=object) for name in names})
            continue
        columns = [to_tensor(_to_array(each), dtype, "cpu") for each in series]
        rows = rows_at_once(shapes, [column[0].numel() for column in columns]) or len(series[0])
        pieces = [
            _predict_rows(model, [column[first : first + rows] for column in columns], shapes, outputs)
            for first in range(0, len(series[0]), rows)
        ]
        values = [[row for each in output for row in each] for output in zip(*pieces)]
        yield pandas.DataFrame(dict(zip(names, values)))


def _predict_rows(
    model: Any, columns: list[Any], shapes: Sequence[Sequence[int]] | None, outputs: int
) -> list[Any]:
    """Return for each output an array with the values of each row."""
    inputs = list(columns)
    for place, shape in enumerate(shapes or ()):
        inputs[place] = reshaped(columns[place], shape, f"input {place + 1}")
    with torch.no_grad():
        found = predict(model, inputs)
    if len(found) != outputs:
        raise UsageError(f"the model returns {len(found)} outputs, and output_cols names {outputs}")
    return [output.double().numpy().reshape(len(columns[0]), -1) for output in found]


def _to_array(values: Any) -> Any:
    """Return a series, or nested arrays in one, as an array of numbers."""
    import numpy as np

    array = np.asarray(values)
    if array.dtype != object:
        return array
    if any(each is None for each in array):
        raise UsageError("a feature column has missing values: remove or fill them, as by df.dropna()")
    return np.stack([_to_array(each) for each in array])
