"""From the columns of a batch to tensors, outputs, a loss and metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ronde.data.columns import Columns
from ronde.errors import UsageError
from ronde.parquet.training import Training, reshaped

__all__ = ["BatchObjective", "Evaluation", "describe_columns", "predict", "to_tensor"]


class Evaluation(NamedTuple):
    """Of a batch: the loss, the metrics in the order of `BatchObjective.names`, and its number of rows."""

    loss: Any
    metrics: list[Any]
    rows: int


class BatchObjective:
    """The loss and the metrics of a training, for batches.

    `names`: of the metrics; with several label columns they end in the column's name. `output_sizes`: how many values
    each output has for each row, once a batch was evaluated.
    """

    def __init__(self, training: Training, device: str = "cpu") -> None:
        self._training, self._device = training, device
        self._dtype = float_dtype(training.model)
        self._losses = [_by_row(loss) if training.sample_weight_col else loss for loss in training.losses]
        several = len(training.label_cols) > 1
        self._metrics = [
            (f"{name}_{column}" if several else name, place, function)
            for place, (column, functions) in enumerate(zip(training.label_cols, training.metrics))
            for name, function in functions.items()
        ]
        self.names = [name for name, _, _ in self._metrics]
        self.output_sizes: list[int] = []

    def evaluate(self, columns: Columns) -> Evaluation:
        """Return the loss and the metrics of a batch.

        Raises UsageError for the first batch if the model or a loss does not take what the columns hold.
        """
        training = self._training
        is_first = not self.output_sizes
        rows = len(columns[training.feature_cols[0]])
        inputs = self._tensors(columns, training.feature_cols, training.input_shapes)
        labels = self._tensors(columns, training.label_cols, training.label_shapes)
        try:
            outputs = predict(training.model, inputs)
            if len(outputs) != len(labels):
                raise UsageError(
                    f"the model returns {len(outputs)} outputs, and label_cols are {training.label_cols}"
                )
            if training.label_shapes is None:
                labels = [_like(label, output) for label, output in zip(labels, outputs)]
            loss = self._loss(outputs, labels, columns)
            values = [function(outputs[place], labels[place]) for _, place, function in self._metrics]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if not is_first:
                raise
            given = describe_columns(columns, [*training.feature_cols, *training.label_cols])
            raise UsageError(
                f"the model, a loss or a metric fails for the first batch: {error}. The columns are {given}; floats "
                f"have become {self._dtype}, integers torch.int64. Give input_shapes or label_shapes, cast the column "
                "(df.withColumn), or convert it in the loss: lambda output, label: loss(output, label.long())"
            ) from error
        # By the rows, because an output for a shape without rows, such as [2], has no dimension for them either.
        self.output_sizes = [output.numel() // rows for output in outputs]
        return Evaluation(loss, values, rows)

    def _loss(self, outputs: Sequence[Any], labels: Sequence[Any], columns: Columns) -> Any:
        training = self._training
        factors = training.loss_weights or [1.0] * len(labels)
        losses = [loss(output, label) for loss, output, label in zip(self._losses, outputs, labels)]
        if training.sample_weight_col:
            weights = to_tensor(columns[training.sample_weight_col], self._dtype, self._device)
            losses = [(loss * weights).mean() for loss in losses]
        return sum(factor * loss for factor, loss in zip(factors, losses))

    def _tensors(
        self, columns: Columns, names: Sequence[str], shapes: Sequence[Sequence[int]] | None
    ) -> list[Any]:
        tensors = [to_tensor(columns[name], self._dtype, self._device) for name in names]
        for place, shape in enumerate(shapes or ()):
            tensors[place] = reshaped(tensors[place], shape, f"column {names[place]!r}")
        return tensors


def float_dtype(model: Any) -> Any:
    """Return the dtype of the model's parameters, or float32 if it has none of floats."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def to_tensor(array: NDArray[np.generic], dtype: Any, device: str) -> Any:
    """Return an array as a tensor: floats of this dtype, integers as int64, booleans as they are."""
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    tensor = torch.from_numpy(np.array(array))
    return tensor.to(device, dtype if array.dtype.kind == "f" else None)


def predict(model: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of the model as a list."""
    outputs = model(*inputs)
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def describe_columns(columns: Columns, names: Sequence[str]) -> str:
    """Return names, types and shapes of columns for a message."""
    return ", ".join(f"{name!r} ({columns[name].dtype}, shape {list(columns[name].shape)})" for name in names)


def _like(label: Any, output: Any) -> Any:
    """Return the label in the shape of the output, if it has as many values."""
    return label.reshape(output.shape) if label.numel() == output.numel() else label


def _by_row(loss: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the loss as a function that returns a value for each row."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        each: Any = copy.copy(loss)
        each.reduction = "none"
    else:

        def each(output: Any, label: Any) -> Any:
            return loss(output, label, reduction="none")

    def by_row(output: Any, label: Any) -> Any:
        values = each(output, label)
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return by_row
