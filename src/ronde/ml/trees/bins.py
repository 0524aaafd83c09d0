"""Bins: each column's values replaced by numbers of one byte, such that trees split between bins.

The borders come from a sample of the rows, chosen by seed and row number: the same for any number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde._native import tree_bin_rows
from ronde.ml.fitted_forms import Sizes
from ronde.ml.source_data import is_sparse

__all__ = ["Bins", "BinsForm", "check_categories", "find_bins", "hashed_rows", "sample_size"]

Array = NDArray[Any]

WIDEST_GROUP = 16  # columns, as in cpp/trees/binned_rows.h
MOST_SAMPLED = 200_000  # rows
MOST_SAMPLED_NUMBERS = 1 << 26
MOST_CATEGORIES = 254
NUMBERS_AT_ONCE = 1 << 20  # of sparse rows that are dense for a moment
LEAST_SAMPLED = 10_000  # rows, of however many columns


@dataclass(frozen=True)
class Bins:
    """The bins of all columns.

    Attributes:
        values: float64: of a column of numbers the largest value of each bin but the last, ascending; of one of
            categories the categories, ascending.
        starts: int64: column c has the values from `starts[c]` to `starts[c + 1]`.
        is_categorical: uint8: 1 for a column of categories.
    """

    values: Array
    starts: Array
    is_categorical: Array

    @property
    def num_columns(self) -> int:
        """How many columns there are."""
        return len(self.is_categorical)

    def of(self, X: Any, threads: int = 1) -> Array:
        """Return the bins of rows, uint8, in the layout of cpp/trees/binned_rows.h.

        `X`: shape (rows, columns), float64 or float32, or CSR; NaN is a missing value.
        """
        if is_sparse(X):
            return self._of_sparse(X, threads)
        X = np.ascontiguousarray(X)
        groups, width = _groups_of(self.num_columns)
        binned = np.empty(groups * width * len(X), np.uint8)
        tree_bin_rows(X, *self.arrays, binned, threads)
        return binned

    def _of_sparse(self, X: Any, threads: int) -> Array:
        """Return `of` of CSR: some rows at a time, so that there is no dense copy of all."""
        count = X.shape[0]
        binned, at_once = self.empty(count), max(1, NUMBERS_AT_ONCE // max(1, self.num_columns))
        for begin in range(0, count, at_once):
            self.put(X[begin : begin + at_once].toarray(), binned, begin, threads)
        return binned

    def empty(self, num_rows: int) -> Array:
        """Return room for the bins of so many rows, in the layout of `of`, for `put`."""
        groups, width = _groups_of(self.num_columns)
        return np.empty(groups * width * num_rows, np.uint8)

    def put(self, X: Any, binned: Array, first: int, threads: int = 1) -> None:
        """Write the bins of some rows to their place among all. `first`: the number of the first one."""
        groups, width = _groups_of(self.num_columns)
        part = self.of(X, threads).reshape(groups, X.shape[0], width)
        binned.reshape(groups, -1, width)[:, first : first + X.shape[0]] = part

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """The arrays, in the order of the native functions."""
        return self.values, self.starts, self.is_categorical

    @property
    def plain(self) -> dict[str, Array]:
        """The arrays by name, as in files."""
        return {"values": self.values, "starts": self.starts, "is_categorical": self.is_categorical}

    def border(self, column: int, number: int) -> float:
        """Return the largest value of a bin of a column of numbers; infinity of the last one."""
        begin, end = self.starts[column : column + 2]
        return float(self.values[begin + number]) if begin + number < end else float("inf")


def _groups_of(columns: int) -> tuple[int, int]:
    """Return the number of groups of columns, and their width."""
    groups = -(-columns // WIDEST_GROUP)
    return groups, -(-columns // groups)


@dataclass(frozen=True)
class BinsForm:
    """The form of the arrays of `Bins.plain` in a file."""

    is_needed: bool = True

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        kinds = {"values": "float64", "starts": "int64", "is_categorical": "uint8"}
        if problem := arrays_problem(value, kinds):
            return problem
        columns = sizes.setdefault("features", len(value["is_categorical"]))
        starts = value["starts"]
        if len(value["is_categorical"]) != columns or len(starts) != columns + 1:
            return f"has not the bins of {columns} columns"
        counts = np.diff(starts)
        if starts[0] or starts[-1] != len(value["values"]) or (counts < 0).any() or (counts > 254).any():
            return "has columns with an impossible number of bins"
        return None


def arrays_problem(value: Any, kinds: Mapping[str, str], two_axes: Sequence[str] = ()) -> str | None:
    """Return what is wrong with a dict of arrays, None: nothing. `kinds`: dtypes by name; `two_axes`: not one axis."""
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        return f"is not a dict of {', '.join(kinds)}"
    for name, kind in kinds.items():
        array = value[name]
        if (
            not isinstance(array, np.ndarray)
            or array.dtype.name != kind
            or array.ndim != 1 + (name in two_axes)
        ):
            return f"has {name!r}, which is not an array of {kind} with {1 + (name in two_axes)} axes"
    return None


def hashed_rows(seed: int, numbers: Array) -> Array:
    """Return a random uint64 number for each number of a row, that of `mixed` in cpp/trees/gradients.h."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def chosen_rows(seed: int, rows: range | Array, fraction: float) -> Array:
    """Return for each number of a row whether this is chosen, with this probability."""
    numbers = np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
    return hashed_rows(seed, numbers) < np.uint64(min(fraction, 1 - 2.0**-53) * 2.0**64)


def sample_size(num_columns: int) -> int:
    """Return how many rows a sample for `find_bins` has, about."""
    return min(MOST_SAMPLED, max(LEAST_SAMPLED, MOST_SAMPLED_NUMBERS // num_columns))


def find_bins(
    sample: Any, weights: Array | None, max_bins: int, is_categorical: Array, by_range: float = 0.0
) -> Bins:
    """Return the bins for rows of which these are a sample.

    `sample`: shape (rows, columns), an array or CSR. `weights`: of the rows, above 0; None: 1 each. `max_bins`: of a
    column, at most 255. `by_range`: which part of the bins of numbers have equal ranges; the others have as many rows.
    Raises ValueError if a column has more categories than that.
    """
    columns = _columns_of(sample)
    values = [
        _categories(columns(number), max_bins, f"at index {number}")
        if is_categorical[number]
        else _borders(columns(number), weights, max_bins, by_range)
        for number in range(sample.shape[1])
    ]
    starts = np.cumsum([0, *map(len, values)], dtype=np.int64)
    return Bins(np.concatenate(values), starts, is_categorical.astype(np.uint8))


def _borders(column: Array, weights: Array | None, max_bins: int, by_range: float) -> Array:
    """Return the largest value of each bin but the last: between all values, or at quantiles if there are too many."""
    is_there = ~np.isnan(column)
    numbers, weights = column[is_there], weights if weights is None else weights[is_there]
    if not len(numbers):
        return np.empty(0)
    if weights is None:
        numbers = np.sort(numbers)
    else:
        order = np.argsort(numbers, kind="stable")
        numbers, weights = numbers[order], weights[order]
    ends = np.append(np.flatnonzero(numbers[1:] != numbers[:-1]), len(numbers) - 1)  # of equal numbers
    values = numbers[ends].astype(np.float64)
    kept = np.arange(len(values) - 1)
    if len(values) > max_bins:
        below = ends + 1.0 if weights is None else np.cumsum(weights)[ends]
        with np.errstate(over="ignore", invalid="ignore"):
            span = values[-1] - values[0]
        if by_range and np.isfinite(span):
            below = (1 - by_range) * below / below[-1] + by_range * (values - values[0]) / span
        kept = np.searchsorted(below, below[-1] * np.arange(1, max_bins) / max_bins)
        kept = np.unique(np.minimum(kept, len(values) - 2))
    with np.errstate(invalid="ignore"):
        borders = values[kept] / 2 + values[kept + 1] / 2
    return np.asarray(np.where(np.isfinite(borders), borders, values[kept]))


def _columns_of(X: Any) -> Callable[[int], Array]:
    """Return a function that returns a column of rows, an array or CSR, as an array."""
    if not is_sparse(X):
        return lambda number: np.asarray(X[:, number])
    by_column = X.tocsc()
    return lambda number: np.asarray(by_column[:, [number]].toarray()[:, 0])


def check_categories(X: Any, max_bins: int, is_categorical: Array, names: Sequence[str] = ()) -> None:
    """Raise ValueError if a column of rows has more categories than `find_bins` takes. `names`: of columns, or none."""
    for column in np.flatnonzero(is_categorical).tolist():
        values = X[:, [column]].toarray()[:, 0] if is_sparse(X) else X[:, column]
        _categories(values, max_bins, repr(names[column]) if len(names) else f"at index {column}")


def _categories(column: Array, max_bins: int, name: str) -> Array:
    most = min(max_bins, MOST_CATEGORIES)
    found = np.unique(column[column >= 0].astype(np.float64))
    if len(found) > most:
        raise ValueError(
            f"Categorical feature {name} is expected to have a cardinality <= {most} but actually has a cardinality of "
            f"{len(found)}: take it as a column of numbers, or join rare categories"
        )
    return found
