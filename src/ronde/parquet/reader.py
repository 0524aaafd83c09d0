"""Reads row groups of Parquet files as NumPy arrays, by pyarrow.dataset."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.parquet.needs import need
from ronde.parquet.rows import Columns, RowGroup, RowSpan
from ronde.parquet.store import open_filesystem
from ronde.parquet.training import DataIndex

__all__ = ["ParquetReader", "find_row_groups", "index_data", "to_array"]

THREADS = 8  # that read the ends of files, where the row groups are listed


class ParquetReader:
    """Reads columns of row groups.

    Args:
        url: A URL of fsspec; the row groups' files are in the same file system.
        columns: The names of the columns that are read.
        options: Passed to fsspec's file system.
    """

    def __init__(self, url: str, columns: Sequence[str], options: dict[str, Any] | None = None) -> None:
        self._dataset = need("pyarrow", "pyarrow.dataset")
        self._columns = list(dict.fromkeys(columns))
        self._files = _arrow_filesystem(url, options)
        self._url = url

    def read(self, span: RowSpan) -> Columns:
        """Return the rows of a span: for each column an array, the rows in its first dimension.

        Raises UsageError if the file cannot be found, or a column is not an array.
        """
        group = span.group
        fragment = self._dataset.ParquetFileFormat().make_fragment(
            group.file, filesystem=self._files, row_groups=[group.number]
        )
        try:
            table = fragment.to_table(columns=self._columns)
        except FileNotFoundError:
            raise UsageError(
                f"{group.file} is not to be found on this host: the store {self._url} must be a folder that the driver "
                "and all workers share, as HDFS, S3 or NFS are"
            ) from None
        table = table.slice(span.first, span.end - span.first)
        return {name: to_array(name, table.column(name), group.file) for name in self._columns}


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


def find_row_groups(
    url: str, columns: Sequence[str], options: dict[str, Any] | None = None
) -> list[RowGroup]:
    """Return the row groups of all Parquet files in a folder, in the order of the files' names.

    Raises UsageError if there is no Parquet file, or a file lacks one of the columns.
    """
    dataset = need("pyarrow", "pyarrow.dataset")
    files, path = open_filesystem(url, options)
    files.invalidate_cache()
    names = sorted(name for name in files.find(path) if _is_data(name, path))
    if not names:
        raise UsageError(f"{url} has no Parquet file: expected a folder with files named *.parquet")
    arrow, kind = _arrow_filesystem(url, options), dataset.ParquetFileFormat()

    def groups_of(name: str) -> list[RowGroup]:
        fragment = kind.make_fragment(name, filesystem=arrow)
        known = fragment.physical_schema.names
        if missing := [each for each in columns if each not in known]:
            raise UsageError(f"{name} lacks the columns {missing}: it has {sorted(known)}")
        return [RowGroup(name, group.id, group.num_rows) for group in fragment.row_groups if group.num_rows]

    with ThreadPoolExecutor(THREADS) as pool:
        return [group for groups in pool.map(groups_of, names) for group in groups]


def _is_data(name: str, folder: str) -> bool:
    parts = name.removeprefix(folder).strip("/").split("/")
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in parts)


def _arrow_filesystem(url: str, options: dict[str, Any] | None) -> Any:
    fs = need("pyarrow", "pyarrow.fs")
    files, _ = open_filesystem(url, options)
    if "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
        return fs.LocalFileSystem()
    return fs.PyFileSystem(fs.FSSpecHandler(files))


def to_array(name: str, column: Any, file: str = "") -> NDArray[np.generic]:
    """Return a column of an Arrow table as an array; lists become further dimensions.

    Raises UsageError if a value is missing, lists differ in length, or the type is none of numbers.
    """
    pa, compute = need("pyarrow"), need("pyarrow", "pyarrow.compute")
    where = f" in {file}" if file else ""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    shape = [len(column)]
    while True:
        if column.null_count:
            raise UsageError(
                f"column {name!r}{where} has {column.null_count} missing values: remove or fill them, as by df.dropna()"
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
    if not (
        pa.types.is_integer(column.type)
        or pa.types.is_floating(column.type)
        or pa.types.is_boolean(column.type)
    ):
        raise UsageError(
            f"column {name!r}{where} has the type {column.type}: expected numbers, or lists of numbers; convert a "
            "Spark vector by pyspark.ml.functions.vector_to_array"
        )
    array: NDArray[np.generic] = column.to_numpy(zero_copy_only=False).reshape(shape)
    return array
