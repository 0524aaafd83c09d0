"""Parquet files: which of them a path stands for, what their metadata say, and their row groups as arrays.

Files in one folder come in the order of their names, so that row numbers do not depend on the file system.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote

from ronde.data.columns import Columns, to_array
from ronde.data.needs import need
from ronde.errors import UsageError

__all__ = [
    "ParquetFileFacts",
    "ParquetReader",
    "RowGroup",
    "RowSpan",
    "arrow_filesystem",
    "describe_files",
    "find_files",
    "find_row_groups",
    "open_filesystem",
    "spans_of",
]


DBFS = "dbfs:"
THREADS = 8  # that read the ends of files, where the metadata are
_MAGIC = "*?["


class RowGroup(NamedTuple):
    """A part of a Parquet file that is read as a whole; `number` counts within the file."""

    file: str
    number: int
    rows: int


class RowSpan(NamedTuple):
    """The rows from `first` to before `end` of a row group."""

    group: RowGroup
    first: int
    end: int


def spans_of(groups: Sequence[RowGroup], rows: range) -> list[RowSpan]:
    """Return the spans of row groups that hold these rows, when all rows are counted in the order of the groups."""
    spans = []
    before = 0
    for group in groups:
        first, end = max(rows.start - before, 0), min(rows.stop - before, group.rows)
        if first < end:
            spans.append(RowSpan(group, first, end))
        before += group.rows
    return spans


def open_filesystem(url: str, options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path there. Raises UsageError if a package is missing."""
    core = need("fsspec", "fsspec.core")
    if url.startswith(DBFS):
        url = "file:///dbfs/" + url.removeprefix(DBFS).lstrip("/")
    try:
        files, path = core.url_to_fs(url, **(options or {}))
    except (ImportError, ValueError) as error:
        raise UsageError(f"the store {url} cannot be opened: {error}") from None
    return files, path


class ParquetFileFacts(NamedTuple):
    """What the metadata of a file say.

    `groups`: its row groups that have rows; `types`: Arrow types by the name of the column; `partition`: values that
    stand in the names of its folders, such as `year=2024`.
    """

    path: str
    groups: list[RowGroup]
    types: dict[str, Any]
    partition: dict[str, str]


def find_files(url: str, options: dict[str, Any] | None = None) -> list[str]:
    """Return the paths of the Parquet files that a URL stands for: a file, all files below a folder, or a pattern.

    Raises UsageError if there are none.
    """
    files, path = open_filesystem(url, options)
    files.invalidate_cache()
    is_pattern = any(sign in path for sign in _MAGIC) and not files.exists(path)
    found: list[str] = []
    for each in sorted(files.glob(path)) if is_pattern else [path]:
        is_folder = files.isdir(each)
        found += sorted(name for name in files.find(each) if not is_folder or _is_data(name, each))
    if not found:
        raise UsageError(
            f"{url} has no Parquet file: expected a file, a folder with files named *.parquet, or a pattern"
        )
    return found


def describe_files(url: str, options: dict[str, Any] | None = None) -> list[ParquetFileFacts]:
    """Return what the metadata of the Parquet files say, in the order of `find_files`.

    Raises UsageError if there is no such file, or it is no Parquet file.
    """
    parquet, arrow = need("pyarrow", "pyarrow.parquet"), arrow_filesystem(url, options)
    names = find_files(url, options)
    error = need("pyarrow").ArrowInvalid

    def describe(name: str) -> ParquetFileFacts:
        try:
            with parquet.ParquetFile(name, filesystem=arrow) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except error as problem:
            raise UsageError(f"{name} cannot be read as a Parquet file: {problem}") from None
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        groups = [RowGroup(name, number, count) for number, count in enumerate(rows) if count]
        return ParquetFileFacts(name, groups, dict(zip(schema.names, schema.types)), _partition(name))

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(describe, names))


def arrow_filesystem(url: str, options: dict[str, Any] | None = None) -> Any:
    """Return the file system of a URL as one of Arrow."""
    fs = need("pyarrow", "pyarrow.fs")
    files, _ = open_filesystem(url, options)
    if "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
        return fs.LocalFileSystem()
    return fs.PyFileSystem(fs.FSSpecHandler(files))


def _is_data(name: str, folder: str) -> bool:
    parts = name.removeprefix(folder).strip("/").split("/")
    return name.endswith(".parquet") and not any(part.startswith((".", "_")) for part in parts)


def _partition(name: str) -> dict[str, str]:
    """Return what the folders `NAME=VALUE` of a path say, as Hive and Spark write them."""
    pairs = [part for part in name.split("/")[:-1] if "=" in part.strip("=")]
    return {key: unquote(value) for key, _, value in (pair.partition("=") for pair in pairs)}


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
        return self._arrays(self.read_table(span), span.group.file)

    def read_table(self, span: RowSpan) -> Any:
        """Return the rows of a span as an Arrow table. Raises UsageError if the file cannot be found."""
        with self._open(span.group.file) as file:
            table = file.read_row_group(span.group.number, columns=self._columns)
        return table.slice(span.first, span.end - span.first)

    def batches(
        self, span: RowSpan, batch_rows: int, piece_bytes: int = 0, nullable: Collection[str] = ()
    ) -> Iterator[Columns]:
        """Yield the rows of a span in batches of at most `batch_rows`.

        `piece_bytes`: how much of a column is read from the file at once, to save memory; 0: all of the row group.
        `nullable`: the columns whose nulls become NaN.
        Raises UsageError as `read`.
        """
        group, before = span.group, 0
        with self._open(group.file, piece_bytes) as file:
            for batch in file.iter_batches(batch_rows, row_groups=[group.number], columns=self._columns):
                first, end = max(span.first - before, 0), min(span.end - before, batch.num_rows)
                if first < end:
                    yield self._arrays(batch.slice(first, end - first), group.file, nullable)
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

    def _arrays(self, rows: Any, file: str, nullable: Collection[str] = ()) -> Columns:
        return {name: to_array(name, rows.column(name), file, name in nullable) for name in self._columns}


def find_row_groups(
    url: str, columns: Sequence[str], options: dict[str, Any] | None = None
) -> list[RowGroup]:
    """Return the row groups of all Parquet files in a folder, in the order of the files' names.

    Raises UsageError if there is no Parquet file, or a file lacks one of the columns.
    """
    files = describe_files(url, options)
    for file in files:
        if missing := [name for name in columns if name not in file.types]:
            raise UsageError(f"{file.path} lacks the columns {missing}: it has {sorted(file.types)}")
    return [group for file in files for group in file.groups]
