"""Columns of Arrow tables as arrays, and which columns become which arrays of rows.

    columns                             what tasks get
    None                                a 2-d array of all columns of numbers
    ["a", "b"]                          a 2-d array of these columns
    "a"                                 an array of the values of this column
    {"X": ["a", "b"], "y": "c"}         arrays as attributes, each from one of the above

2-d arrays contain floats: float32 if that represents the values of all columns exactly, otherwise float64. The values
of a single column keep their type. A column of lists of numbers becomes one column of the array for each list element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.data.needs import need
from ronde.data.rows import Buffers, NamedArrays
from ronde.errors import UsageError

__all__ = ["ColumnSelection", "Columns", "ColumnsOption", "holds_numbers", "stored_dtype", "to_array"]

Array = NDArray[Any]
Columns = Mapping[str, NDArray[np.generic]]
Part = str | Sequence[str] | None
ColumnsOption = Part | Mapping[str, Part]

_ONLY = ""  # the name of an array that has none
ALIGNMENT = 64  # bytes


@dataclass(frozen=True)
class ArrayLayout:
    """From which columns an array is made; dtype and shape of its rows."""

    columns: tuple[str, ...]
    is_matrix: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """How many bytes a row has."""
        return self.dtype.itemsize * math.prod(self.shape)


class ColumnSelection:
    """The columns that are read from a table, and the arrays that they become.

    Args:
        option: The argument `columns` of `read`.
        numeric: The columns of numbers, in their order, which `None` stands for.
        known: All columns.
        table: What the table is called in errors.

    Attributes:
        names: The columns that are read.

    Raises:
        UsageError: A column does not exist, or an array would have none.
    """

    def __init__(
        self, option: ColumnsOption, numeric: Sequence[str], known: Sequence[str], table: str
    ) -> None:
        parts = dict(option) if isinstance(option, Mapping) else {_ONLY: option}
        named = [name for part in parts.values() for name in _names_in(part)]
        if missing := [name for name in named if name not in known]:
            raise UsageError(f"{table} lacks the columns {missing}: it has {list(known)}")
        others = [name for name in numeric if name not in named]
        self._parts = {
            key: (tuple(others if part is None else _names_in(part)), not isinstance(part, str))
            for key, part in parts.items()
        }
        if not parts or not all(columns for columns, _ in self._parts.values()):
            raise UsageError(
                f"columns={option!r} selects no columns of numbers of {table}: it has {list(known)}"
            )
        self._is_single = not isinstance(option, Mapping)
        self.names = tuple(dict.fromkeys(name for columns, _ in self._parts.values() for name in columns))

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of the array with this name, or of the only array if it has none; () without such one."""
        columns, _ = self._parts.get(part, self._parts.get(_ONLY, ((), True)))
        return columns

    def columns_only_of(self, part: str) -> frozenset[str]:
        """Return the columns of an array, as `columns_of`, without those that another array has, too."""
        own = self.columns_of(part)
        others = [columns for columns, _ in self._parts.values() if columns != own]
        return frozenset(own).difference(*others)

    def learn(self, sample: Columns) -> None:
        """Take dtypes and shapes from some rows. Call this before the other methods."""
        self._rows = {name: (sample[name].dtype, sample[name].shape[1:]) for name in self.names}
        self._layouts = {
            key: self._layout_of(columns, is_matrix) for key, (columns, is_matrix) in self._parts.items()
        }

    def _layout_of(self, columns: tuple[str, ...], is_matrix: bool) -> ArrayLayout:
        rows = [self._rows[name] for name in columns]
        if not is_matrix:
            return ArrayLayout(columns, False, *rows[0])
        dtype = np.result_type(np.float32, *(dtype for dtype, _ in rows))
        return ArrayLayout(columns, True, dtype, (sum(math.prod(shape) for _, shape in rows),))

    @property
    def row_bytes(self) -> int:
        """How many bytes a row has in the arrays."""
        return sum(each.row_bytes for each in self._layouts.values())

    def empty(self, rows: int, buffers: Buffers, most_rows: int) -> dict[str, Array]:
        """Return arrays for this number of rows, which `fill` fills.

        They share one array of the buffers, which has the same size for all numbers of rows up to `most_rows`.
        """
        sizes = [
            each.row_bytes * most_rows + -each.row_bytes * most_rows % ALIGNMENT
            for each in self._layouts.values()
        ]
        memory, begin, arrays = buffers.empty(sum(sizes), np.dtype(np.uint8)), 0, {}
        for (key, each), size in zip(self._layouts.items(), sizes):
            used = memory[begin : begin + rows * each.row_bytes]
            arrays[key] = used.view(each.dtype).reshape(rows, *each.shape)
            begin += size
        return arrays

    def fill(self, arrays: Mapping[str, Array], at: int, columns: Columns, rows: slice, table: str) -> None:
        """Write rows of the columns into the arrays, from row `at`. `table`: where they come from, for errors.

        Raises UsageError if a column has another dtype or shape than in the sample.
        """
        for name in self.names:
            found = (columns[name].dtype, columns[name].shape[1:])
            if found != self._rows[name]:
                raise UsageError(
                    f"column {name!r} in {table} holds {_describe(*found)} and, in the first row of all, "
                    f"{_describe(*self._rows[name])}: expected one type and one length in all rows"
                )
        count = rows.stop - rows.start
        for key, layout in self._layouts.items():
            target = arrays[key][at : at + count]
            if not layout.is_matrix:
                target[...] = columns[layout.columns[0]][rows]
                continue
            place = 0
            for name in layout.columns:
                values = columns[name][rows].reshape(count, -1)
                target[:, place : place + values.shape[1]] = values
                place += values.shape[1]

    def result(self, arrays: Mapping[str, Array]) -> Any:
        """Return what a task gets: an array, or `NamedArrays` if the user has named them."""
        return arrays[_ONLY] if self._is_single else NamedArrays(arrays)


def _names_in(part: Part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return list(part or ())


def _describe(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"lists of {' x '.join(map(str, shape))} {dtype}" if shape else str(dtype)


# Columns as arrays


def holds_numbers(kind: Any) -> bool:
    """Return whether the values of an Arrow type are numbers, or true and false."""
    types = need("pyarrow", "pyarrow.types")
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    )


def stored_dtype(kind: Any) -> np.dtype[Any]:
    """Return the dtype of an array of values of an Arrow type for which `to_array` has one, without nulls."""
    types = need("pyarrow", "pyarrow.types")
    while types.is_nested(kind):
        kind = kind.value_type
    return np.dtype(np.float64 if types.is_decimal(kind) else kind.to_pandas_dtype())


def to_array(name: str, column: Any, file: str = "", is_nullable: bool = False) -> NDArray[np.generic]:
    """Return a column of an Arrow table as an array; lists become further dimensions.

    `is_nullable`: whether nulls become NaN, and integers floats, so that the dtype does not depend on whether there are
    nulls. Raises UsageError if a value is missing, lists differ in length, or the type is none of numbers.
    """
    plain = _plain_numbers(column)
    if plain is not None and not (is_nullable and plain.dtype.kind != "f"):
        return plain
    pa, compute = need("pyarrow"), need("pyarrow", "pyarrow.compute")
    where = f" in {file}" if file else ""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    shape = [len(column)]
    while True:
        is_nested = pa.types.is_nested(column.type) and not pa.types.is_struct(column.type)
        if column.null_count and (is_nested or not is_nullable):
            inside, remedy = "", "remove or fill them, as by df.dropna()"
            if len(shape) > 1:
                inside, remedy = (
                    " inside its lists",
                    "remove these rows, or fill the values; df.dropna() keeps them",
                )
            raise UsageError(
                f"column {name!r}{where} has {column.null_count} missing values{inside}: {remedy}"
            )
        if not is_nested:
            break
        lengths = (
            compute.min_max(compute.list_value_length(column)).as_py()
            if len(column)
            else {"min": 0, "max": 0}
        )
        if lengths["min"] != lengths["max"]:
            raise UsageError(
                f"column {name!r}{where} has lists of {lengths['min']} to {lengths['max']} values: expected one length"
            )
        shape.append(lengths["max"])
        column = column.flatten()
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if not holds_numbers(column.type):
        raise UsageError(
            f"column {name!r}{where} has the type {column.type}: expected numbers, or lists of numbers; "
            f"{_remedy(column.type)}"
        )
    if is_nullable and not pa.types.is_floating(column.type):
        dtype = np.result_type(np.float32, column.type.to_pandas_dtype())
        column = column.cast(pa.from_numpy_dtype(dtype), safe=False)
    array: NDArray[np.generic] = column.to_numpy(zero_copy_only=False).reshape(shape)
    return array


def _remedy(kind: Any) -> str:
    """Return how to make numbers of the values of an Arrow type."""
    types = need("pyarrow", "pyarrow.types")
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "encode strings as numbers, or, for labels of an estimator, pass them as the array y, and X without them"
    return "convert a Spark vector by pyspark.ml.functions.vector_to_array"


def _plain_numbers(column: Any) -> NDArray[np.generic] | None:
    """Return the numbers of a column that need no conversion; None for all other columns."""
    try:
        array: NDArray[np.generic] = column.to_numpy(zero_copy_only=True)
    except (ValueError, NotImplementedError):  # several chunks, missing values, another type
        return None
    return array if array.dtype.kind in "iuf" else None
