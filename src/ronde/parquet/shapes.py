"""The shapes that the tensors of a batch get: `input_shapes` and `label_shapes`.

A tensor is reshaped as given. A shape with -1 fits batches of any number of rows; one without is that of a whole batch.
The last batch of an epoch may have fewer rows: then the first dimension of such a shape follows the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ronde.errors import UsageError
from ronde.parquet.training import Training

__all__ = ["check_shapes", "reshaped", "rows_at_once"]


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
