"""What is trained, on which columns, and how: what every rank of a run must know.

`input_shapes` and `label_shapes` are the shapes that the tensors of a batch get. A tensor is reshaped as given. A shape
with -1 fits batches of any number of rows; one without is that of a whole batch. The last batch of an epoch may have
fewer rows: then the first dimension of such a shape follows the rows.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ronde.data.needs import need
from ronde.data.parquet_files import ParquetReader, RowGroup, RowSpan, find_row_groups
from ronde.errors import UsageError
from ronde.parquet.store import RunFolder

__all__ = [
    "DataIndex",
    "EpochEnd",
    "Training",
    "check_shapes",
    "index_data",
    "load_training",
    "reshaped",
    "rows_at_once",
    "save_training",
    "stored_row_sizes",
]


TRAINING, DATA = "training.pkl", "data.json"
FIRST_ROW_BYTES = 1 << 16  # to look at one row, not at a row group
_COUNTS = ("batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch")


class EpochEnd(NamedTuple):
    """What a callback gets, on every rank, at the end of an epoch.

    Attributes:
        epoch: The number of the epoch, from 0.
        metrics: Its metrics, of all ranks: `epoch`, `train`, perhaps `validation`, and `seconds`.
        model: The torch module that is trained, on this rank's device.
        optimizer: Its optimizer.
    """

    epoch: int
    metrics: Mapping[str, Any]
    model: Any
    optimizer: Any


@dataclass(frozen=True)
class Training:
    """A model and how it is trained.

    Attributes:
        model: A torch module. It gets a tensor for each feature column, and returns a tensor for each label column.
        optimizer: A torch optimizer of its parameters.
        losses: For each label column a function of output and label.
        feature_cols: The columns that the model gets. Integers become int64, other numbers the model's dtype.
        label_cols: The columns that the losses get.
        metrics: Functions of output and label, by name, for each label column.
        input_shapes: The shape of the tensor of each feature column, with -1 for the rows, or that of a whole batch;
            None: as in the file.
        label_shapes: The same for the label columns; None: the shape of the output, if it has as many values.
        loss_weights: Factors of the losses; None: 1.
        sample_weight_col: The column with the weights of the rows; the losses then take `reduction="none"`.
        batch_size: The rows of a step, on each rank.
        val_batch_size: The same in validation; None: `batch_size`.
        epochs: The number of epochs, also counting those of an earlier job with the same run_id.
        train_steps_per_epoch: At most how many steps an epoch has; None: until all rows are read.
        validation_steps_per_epoch: The same in validation.
        shuffle: Whether row groups and rows come in another order in each epoch.
        shuffle_buffer_rows: Among how many rows each rank shuffles.
        seed: From which the order follows, and random numbers of the model.
        backward_passes_per_step: How many batches add up gradients before the optimizer's step.
        compression: As of `ronde.torch.DistributedOptimizer`; None: none.
        callbacks: Functions of an EpochEnd, called on every rank; training ends if one returns True on any rank.
        use_gpu: Whether to train on the GPU of the local rank, if there is one.
    """

    model: Any
    optimizer: Any
    losses: Sequence[Callable[..., Any]]
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    metrics: Sequence[Mapping[str, Callable[..., Any]]] = ()
    input_shapes: Sequence[Sequence[int]] | None = None
    label_shapes: Sequence[Sequence[int]] | None = None
    loss_weights: Sequence[float] | None = None
    sample_weight_col: str | None = None
    batch_size: int = 32
    val_batch_size: int | None = None
    epochs: int = 1
    train_steps_per_epoch: int | None = None
    validation_steps_per_epoch: int | None = None
    shuffle: bool = True
    shuffle_buffer_rows: int = 16384
    seed: int = 0
    backward_passes_per_step: int = 1
    compression: Any = None
    callbacks: Sequence[Callable[[EpochEnd], object]] = ()
    use_gpu: bool = True

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} is invalid: expected 1 or more")
        if not self.feature_cols or not self.label_cols:
            raise UsageError(
                f"feature_cols={self.feature_cols} and label_cols={self.label_cols} are invalid: expected the name of "
                "at least one column each"
            )
        self._require_one_each("losses", "label_cols")
        self._require_one_each("metrics", "label_cols")
        self._require_one_each("loss_weights", "label_cols")
        self._require_one_each("label_shapes", "label_cols")
        self._require_one_each("input_shapes", "feature_cols")
        self._require_shapes("label_shapes")
        self._require_shapes("input_shapes")

    def _require_one_each(self, name: str, columns: str) -> None:
        given, expected = getattr(self, name), len(getattr(self, columns))
        if given and len(given) != expected:
            raise UsageError(
                f"{name} has {len(given)} elements, and {columns} {expected}: expected one for each column"
            )

    def _require_shapes(self, name: str) -> None:
        for shape in getattr(self, name) or ():
            sizes = list(shape) if isinstance(shape, Sequence) else [0]
            if (
                not all(isinstance(size, int) and (size > 0 or size == -1) for size in sizes)
                or sizes.count(-1) > 1
            ):
                raise UsageError(
                    f"{name}={getattr(self, name)} is invalid: expected a shape for each column, such as [[-1, 2]], of "
                    "whole numbers from 1, and -1 for the rows"
                )

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        weights = [self.sample_weight_col] if self.sample_weight_col else []
        return list(dict.fromkeys([*self.feature_cols, *self.label_cols, *weights]))


class DataIndex(NamedTuple):
    """The row groups of a run's data, and a URL of their file system."""

    url: str
    train: list[RowGroup]
    validation: list[RowGroup]

    def to_json(self) -> bytes:
        """Return this as text, which `read` reads."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, text: bytes) -> DataIndex:
        """Return what `to_json` has written."""
        url, *parts = json.loads(text)
        return cls(url, *([RowGroup(*group) for group in groups] for groups in parts))


def index_data(
    train: str, validation: str | None, columns: Sequence[str], options: dict[str, Any] | None = None
) -> DataIndex:
    """Return the row groups of two folders; `validation` may be None.

    Raises UsageError if a folder has no rows, or lacks a column.
    """
    parts = []
    for name, url in (("training", train), ("validation", validation)):
        groups = find_row_groups(url, columns, options) if url else []
        if url and not groups:
            raise UsageError(f"the {name} data in {url} have no rows: expected at least one")
        parts.append(groups)
    return DataIndex(train, *parts)


def stored_row_sizes(
    data: DataIndex, columns: Sequence[str], options: dict[str, Any] | None = None
) -> dict[str, int]:
    """Return how many values each column has in the first row."""
    reader = ParquetReader(data.url, columns, options)
    rows = next(reader.batches(RowSpan(data.train[0], 0, 1), 1, FIRST_ROW_BYTES))
    return {name: array[0].size for name, array in rows.items()}


def save_training(folder: RunFolder, training: Training) -> str:
    """Write the training for its ranks; return the digest by which they know it.

    Raises UsageError if it cannot be pickled.
    """
    cloudpickle = need("cloudpickle", extra="parquet")
    try:
        # As one object, so that the optimizer keeps its references to the model's parameters.
        content = cloudpickle.dumps(training)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UsageError(
            f"the model, optimizer, losses, metrics or callbacks cannot be sent to workers: {error}; open what "
            "cannot, such as files and locks, where it is used"
        ) from error
    folder.write(TRAINING, content)
    return _digest_of(content)


def load_training(folder: RunFolder, digest: str) -> tuple[Training, DataIndex]:
    """Return the training and the data of a run. `digest`: what `save_training` returned.

    Raises UsageError if this host does not find them, or the training is another one: others may write into a store,
    and the training is a program.
    """
    content, index = folder.read(TRAINING), folder.read(DATA)
    if content is None or index is None:
        raise UsageError(
            f"{folder.url} is empty on this host: the store {folder.store.url} must be a folder that the driver and "
            "all workers share, as HDFS, S3 or NFS are"
        )
    if _digest_of(content) != digest:
        raise UsageError(
            f"{folder.url}/{TRAINING} is not what the driver wrote, so Ronde does not run it: another job or user has "
            "replaced it; give each job its own run_id, and check who may write into the store"
        )
    return pickle.loads(content), DataIndex.from_json(index)


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_shapes(training: Training, sizes: Mapping[str, int]) -> None:
    """Raise UsageError if a column's values do not fit the shape that the training gives it.

    `sizes`: the number of values that a column has in each row, by name; columns that are not there are not checked.
    """
    batches = {"batch_size": training.batch_size, "val_batch_size": training.val_batch_size}
    for option, columns, shapes in (
        ("input_shapes", training.feature_cols, training.input_shapes),
        ("label_shapes", training.label_cols, training.label_shapes),
    ):
        for name, shape in zip(columns, shapes or ()):
            for setting, rows in batches.items():
                if (
                    name in sizes
                    and rows
                    and (problem := _problem(f"column {name!r}", shape, sizes[name], rows))
                ):
                    raise UsageError(
                        f"{option}={[list(each) for each in shapes or ()]}, {setting}={rows}: {problem}"
                    )


def reshaped(tensor: Any, shape: Sequence[int], what: str) -> Any:
    """Return a tensor of rows in this shape. Raises UsageError, which calls it `what`, if they do not fit."""
    rows, wanted = len(tensor), tuple(shape)
    if -1 not in wanted and prod(wanted) > tensor.numel():  # the last batch
        wanted = (-1, *wanted[1:])
        if tensor.numel() % prod(wanted[1:]) == 0:
            return tensor.reshape(wanted)
    if problem := _problem(what, shape, tensor.numel() // rows, rows):
        raise UsageError(problem)
    return tensor.reshape(wanted)


def rows_at_once(shapes: Sequence[Sequence[int]] | None, sizes: Sequence[int]) -> int | None:
    """Return how many rows the shapes of columns with these numbers of values hold; None: any number."""
    held = [
        max(prod(shape) // size, 1) for shape, size in zip(shapes or (), sizes) if -1 not in shape and size
    ]
    return min(held, default=None)


def _problem(what: str, shape: Sequence[int], size: int, rows: int) -> str:
    """Return why a batch of `rows` rows of `size` values does not fit the shape; "" if it does."""
    given, fixed = list(shape), prod(each for each in shape if each != -1)
    if fixed == (size if -1 in given else size * rows):
        return ""
    if fixed == size:
        return (
            f"{given} is the shape of one row of {what}, and a batch has {rows}: write {[-1, *given]}, or set "
            "batch_size to 1"
        )
    return (
        f"{what} has {size} values in each row, which do not fit the shape {given}: expected -1 for the rows, "
        f"and then the shape of one row, such as {[-1, size]}"
    )
