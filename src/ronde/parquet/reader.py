"""Reads row groups of Parquet files as NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.parquet.files import ParquetFileFacts, arrow_filesystem, describe_files
from ronde.parquet.needs import need
from ronde.parquet.rows import Columns, RowGroup, RowSpan
from ronde.parquet.training import DataIndex

__all__ = ["ParquetReader", "find_row_groups", "holds_numbers", "index_data", "stored_row_sizes", "to_array"]

FIRST_ROW_BYTES = 1 << 16  # to look at one row, not at a row group


class ParquetReader:
    """Reads columns of row groups. Can be pickled.

    Args:
        url: A URL of fsspec; the row groups' files are in the same file system.
        columns: The names of the columns that are read.
        options: Passed to fsspec's file system.
    """

    def __init__(self, url: str, columns: Sequence[str], options: dict[str, Any] | None = None) -> None:
        self._columns = list(dict.fromkeys(columns))
        self._url, self._options = url, options

    def read(self, span: RowSpan) -> Columns:
        """Return the rows of a span: for each column an array, the rows in its first dimension.

        Raises UsageError if the file cannot be found, or a column is not an array.
        """
        group = span.group
        with self._open(group.file) as file:
            table = file.read_row_group(group.number, columns=self._columns)
        return self._arrays(table.slice(span.first, span.end - span.first), group.file)

    def batches(self, span: RowSpan, batch_rows: int, piece_bytes: int = 0) -> Iterator[Columns]:
        """Yield the rows of a span in batches of at most `batch_rows`.

        `piece_bytes`: how much of a column is read from the file at once, to save memory; 0: all of the row group.
        Raises UsageError as `read`.
        """
        group, before = span.group, 0
        with self._open(group.file, piece_bytes) as file:
            for batch in file.iter_batches(batch_rows, row_groups=[group.number], columns=self._columns):
                first, end = max(span.first - before, 0), min(span.end - before, batch.num_rows)
                if first < end:
                    yield self._arrays(batch.slice(first, end - first), group.file)
                before += batch.num_rows
                if before >= span.end:
                    return

    def _open(self, file: str, piece_bytes: int = 0) -> Any:
        parquet = need("pyarrow", "pyarrow.parquet")
        files = arrow_filesystem(self._url, self._options)
        try:
            return parquet.ParquetFile(file, filesystem=files, buffer_size=piece_bytes)
        except FileNotFoundError:
            raise UsageError(
                f"{file} is not to be found on this host: {self._url} must be in a file system that the driver and all "
                "workers share, as HDFS, S3 or NFS are"
            ) from None

    def _arrays(self, rows: Any, file: str) -> Columns:
        return {name: to_array(name, rows.column(name), file) for name in self._columns}


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


def find_row_groups(
    url: str, columns: Sequence[str], options: dict[str, Any] | None = None
) -> list[RowGroup]:
    """Return the row groups of all Parquet files in a folder, in the order of the files' names.

    Raises UsageError if there is no Parquet file, or a file lacks one of the columns.
    """

    def check(file: ParquetFileFacts) -> None:
        if missing := [name for name in columns if name not in file.types]:
            raise UsageError(f"{file.path} lacks the columns {missing}: it has {sorted(file.types)}")

    return [group for file in describe_files(url, options, check) for group in file.groups]


def holds_numbers(kind: Any) -> bool:
    """Return whether the values of an Arrow type are numbers, or true and false."""
    types = need("pyarrow", "pyarrow.types")
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    )


def to_array(name: str, column: Any, file: str = "") -> NDArray[np.generic]:
    """Return a column of an Arrow table as an array; lists become further dimensions.

    Raises UsageError if a value is missing, lists differ in length, or the type is none of numbers.
    """
    plain = _plain_numbers(column)
    if plain is not None:
        return plain
    pa, compute = need("pyarrow"), need("pyarrow", "pyarrow.compute")
    where = f" in {file}" if file else ""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    shape = [len(column)]
    while True:
        if column.null_count:
            inside, remedy = "", "remove or fill them, as by df.dropna()"
            if len(shape) > 1:
                inside, remedy = (
                    " inside its lists",
                    "remove these rows, or fill the values; df.dropna() keeps them",
                )
            raise UsageError(
                f"column {name!r}{where} has {column.null_count} missing values{inside}: {remedy}"
            )
        if not pa.types.is_nested(column.type) or pa.types.is_struct(column.type):
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
