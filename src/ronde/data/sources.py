"""Sources of rows: Parquet files and tables, which are read in pieces, and arrays in memory.

Rows of files are kept in memory if they fit, otherwise streamed block by block. A row has the same number in all tasks:
files are in the order of their names, and rows in the order of their file. The number of rows comes from the metadata.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

import numpy as np

from ronde.comm.arrays import check_not_masked
from ronde.data.columns import Columns, ColumnSelection, ColumnsOption, holds_numbers, stored_dtype, to_array
from ronde.data.needs import need
from ronde.data.parquet_files import ParquetFileFacts, ParquetReader, RowGroup, describe_files, spans_of
from ronde.data.read_ahead import read_ahead
from ronde.data.rows import Buffers
from ronde.errors import UsageError
from ronde.process.resources import available_memory

__all__ = ["ArrayRows", "ColumnPieces", "ColumnRows", "array_rows", "parquet_rows", "table_rows"]

PIECE_BYTES = 4 << 20
LEAST_PIECE, MOST_PIECE = 64, 1 << 16  # rows
BLOCKS_AHEAD = 4
# The columns of a larger row group are read from the file in pieces, to save memory.
LARGE_GROUP_BYTES = 64 << 20
COLUMN_PIECE_BYTES = 1 << 18
MIB = 1 << 20
SHARE_OF_MEMORY = 0.5  # for rows; the rest is for the algorithm and its arrays

_Constants = Mapping[str, Mapping[str, float]]  # by column and file


class ColumnPieces(Protocol):
    """Where the columns of a table come from. Can be pickled.

    `num_rows`: how many rows it has; `nullable`: the columns whose nulls become NaN.
    """

    num_rows: int
    nullable: frozenset[str]

    def read(self, rows: range, piece_rows: int, row_bytes: int) -> Iterator[tuple[Columns, str]]:
        """Yield the columns of consecutive rows in pieces, each with the name of the file that it is from.

        `piece_rows`: the most rows of a piece; `row_bytes`: how many bytes a row takes in memory, roughly.
        """


class ColumnRows:
    """A source of rows that come as columns. Rows that do not fit in memory are streamed.

    `selection`: of the columns, after `learn`; `name`: of the table, for messages; `memory_limit`: as of `read`.
    """

    def __init__(
        self, pieces: ColumnPieces, selection: ColumnSelection, name: str, memory_limit: int | None = None
    ) -> None:
        self.num_rows = pieces.num_rows
        self._pieces, self._selection, self._name, self._limit = pieces, selection, name, memory_limit

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_rows} rows of {self._name}>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does."""
        return self._selection.columns_of(part)

    def with_missing_values(self, part: str) -> ColumnRows:
        """Return the same rows, but nulls in columns of a part are NaN. `part`: as of `columns_of`."""
        pieces, selection = copy.copy(self._pieces), copy.copy(self._selection)
        pieces.nullable = selection.columns_only_of(part)
        selection.learn(_first_row(pieces))
        return ColumnRows(pieces, selection, self._name, self._limit)

    def load(self, begin: int, end: int) -> Any:
        """Return rows as `read` describes them."""
        return next(self._blocks([range(begin, end)]))

    def stream(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of consecutive ranges, range by range, while a thread reads the next ones."""
        return read_ahead(self._blocks(blocks), BLOCKS_AHEAD)

    def check_memory(self, rows: int, tasks_here: int) -> str:
        """Return why a task cannot hold this number of rows in memory; "" if it can.

        `tasks_here`: the number of tasks on this machine, which share its memory.
        """
        needed = rows * self._selection.row_bytes
        limit, origin = self._limit, "memory_limit is"
        if limit is None:
            limit = int(available_memory() * SHARE_OF_MEMORY / tasks_here)
            origin = f"half of the free memory, divided by {tasks_here}, is"
        if needed <= limit:
            return ""
        return f"{rows} rows of {self._name} need {needed / MIB:.3g} MiB, and {origin} {limit / MIB:.3g} MiB"

    def _blocks(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of consecutive ranges. The memory of blocks that nothing refers to is used again."""
        buffers, most_rows = Buffers(), max(map(len, blocks), default=0)
        all_rows = range(blocks[0].start, blocks[-1].stop) if blocks else range(0)
        row_bytes = self._selection.row_bytes
        piece_rows = min(max(PIECE_BYTES // max(1, row_bytes), LEAST_PIECE), MOST_PIECE)
        pieces = self._pieces.read(all_rows, piece_rows, row_bytes)
        columns: Columns = {}
        # Of the present piece: where it is from, how many of its rows are taken or not.
        file, used, left = ("", 0, 0)
        for block in blocks:
            arrays, filled = self._selection.empty(len(block), buffers, most_rows), 0
            while filled < len(block):
                if not left:
                    columns, file = next(pieces)
                    used, left = 0, len(next(iter(columns.values())))
                count = min(left, len(block) - filled)
                self._selection.fill(arrays, filled, columns, slice(used, used + count), file)
                filled, used, left = filled + count, used + count, left - count
            yield self._selection.result(arrays)
            del arrays


def parquet_rows(
    urls: Sequence[str],
    columns: ColumnsOption,
    options: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
) -> ColumnRows:
    """Return the rows of Parquet files as a source. Arguments as of `read`.

    Raises UsageError for files without rows, and for columns that hold no numbers, or that one file lacks or has in
    another type.
    """
    fsspec_options = dict(options or {})
    found = [describe_files(url, fsspec_options) for url in urls]
    files = list(chain.from_iterable(found))
    name = urls[0] if len(urls) == 1 else f"{urls[0]} and {len(urls) - 1} others"
    in_paths = _numbers_in_paths(files)
    numeric = [each for each, kind in files[0].types.items() if holds_numbers(kind)]
    known = list(dict.fromkeys([*files[0].types, *in_paths]))
    selection = ColumnSelection(columns, numeric, known, files[0].path)
    stored = [each for each in selection.names if each in files[0].types]
    if not stored:
        raise UsageError(f"columns={columns!r} are in no file of {name}, only in paths: add another column")
    _check_types(files, stored)
    parts = [
        (ParquetReader(url, stored, fsspec_options), [group for file in part for group in file.groups])
        for url, part in zip(urls, found)
    ]
    constants = {each: in_paths[each] for each in selection.names if each not in stored}
    pieces = _ParquetPieces(parts, constants)
    if not pieces.num_rows:
        raise UsageError(f"{name} has no rows: expected at least one")
    selection.learn(_first_row_as_stored(pieces, files[0].types))
    return ColumnRows(pieces, selection, name, memory_limit)


def _first_row_as_stored(pieces: _ParquetPieces, types: Mapping[str, Any]) -> Columns:
    """Return arrays like those of the first row, with any values: nulls there are an error only when they are read."""
    nullable = copy.copy(pieces)
    nullable.nullable = frozenset(types)
    return {
        name: np.empty(array.shape, stored_dtype(types[name])) if name in types else array
        for name, array in _first_row(nullable).items()
    }


def _first_row(pieces: ColumnPieces) -> Columns:
    columns, _ = next(pieces.read(range(1), 1, LARGE_GROUP_BYTES))  # only the beginning of its row group
    return columns


class _ParquetPieces:
    """The columns of files. `parts`: row groups, with a reader for each file system; `constants`: columns in paths."""

    nullable: frozenset[str] = frozenset()

    def __init__(self, parts: Sequence[tuple[ParquetReader, list[RowGroup]]], constants: _Constants) -> None:
        self._parts, self._constants = parts, constants
        sizes = [group.rows for _, groups in parts for group in groups]
        self.num_rows, self._largest_group = sum(sizes), max(sizes, default=0)

    def read(self, rows: range, piece_rows: int, row_bytes: int) -> Iterator[tuple[Columns, str]]:
        piece_bytes = COLUMN_PIECE_BYTES if self._largest_group * row_bytes > LARGE_GROUP_BYTES else 0
        before = 0
        for reader, groups in self._parts:
            for span in spans_of(groups, range(rows.start - before, rows.stop - before)):
                file = span.group.file
                for columns in reader.batches(span, piece_rows, piece_bytes, self.nullable):
                    yield self._with_constants(columns, file), file
            before += sum(group.rows for group in groups)

    def _with_constants(self, columns: Columns, file: str) -> Columns:
        rows = len(next(iter(columns.values())))
        return {**columns, **{name: np.full(rows, value[file]) for name, value in self._constants.items()}}


def _numbers_in_paths(files: Sequence[ParquetFileFacts]) -> dict[str, dict[str, int] | dict[str, float]]:
    """Return the numbers in paths (`year=2024`), by name and file, if the paths of all files have them."""
    values: dict[str, dict[str, int] | dict[str, float]] = {}
    for name in files[0].partition:
        for number in (int, float):
            with suppress(KeyError, ValueError):
                values.setdefault(name, {file.path: number(file.partition[name]) for file in files})
    return values


def _check_types(files: Sequence[ParquetFileFacts], columns: Sequence[str]) -> None:
    """Raise UsageError if a file lacks a column, or has it in another type than the first file."""
    first = files[0]
    for file in files:
        if missing := [name for name in columns if name not in file.types]:
            raise UsageError(
                f"{file.path} lacks the columns {missing}, which {first.path} has: it has {list(file.types)}"
            )
        for name in columns:
            if file.types[name] != first.types[name]:
                raise UsageError(
                    f"column {name!r} has the type {file.types[name]} in {file.path} and {first.types[name]} in "
                    f"{first.path}: write them again with one type, or read them one after the other"
                )


class ArrayRows:
    """Arrays in memory as a source of rows.

    Args:
        arrays: An array, a CSR matrix, or `NamedArrays`.
        num_rows: The number of rows.
        selection: The columns of the table that the arrays come from (None: they come from no table).
        made_up: The columns whose names in the table are not strings, but for example numbers.
    """

    def __init__(
        self,
        arrays: Any,
        num_rows: int,
        selection: ColumnSelection | None = None,
        made_up: Collection[str] = (),
    ) -> None:
        self.num_rows = num_rows
        self._arrays, self._selection, self._made_up = arrays, selection, frozenset(made_up)

    def __repr__(self) -> str:
        return f"<ArrayRows: {self.num_rows} rows>"

    def columns_of(self, part: str) -> tuple[str, ...]:
        """Return the columns of a part, as `ColumnSelection` does; () unless the names of all of them are strings."""
        columns = self._selection.columns_of(part) if self._selection else ()
        return () if self._made_up.intersection(columns) else columns

    def load(self, begin: int, end: int) -> Any:
        """Return rows, which share the memory of the arrays."""
        return self._arrays[begin:end]


def table_rows(source: Any, columns: ColumnsOption) -> ArrayRows:
    pa = need("pyarrow")
    try:
        table = pa.table(source)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(f"the source of type {_type(source)} is not a table: {error}") from None
    if not table.num_rows:
        raise UsageError(f"the table of type {_type(source)} has no rows: expected at least one")
    index = (table.schema.pandas_metadata or {}).get("index_columns", ())
    fields = [field for field in table.schema if field.name not in index]  # without the index of pandas
    numeric = [field.name for field in fields if holds_numbers(field.type)]
    name = f"the table of type {_type(source)}"
    selection = ColumnSelection(columns, numeric, [field.name for field in fields], name)
    found = {each: to_array(each, table.column(each), name) for each in selection.names}
    selection.learn(found)
    arrays = selection.empty(table.num_rows, Buffers(), table.num_rows)
    selection.fill(arrays, 0, found, slice(0, table.num_rows), name)
    return ArrayRows(selection.result(arrays), table.num_rows, selection, _made_up_names(source, fields))


def _made_up_names(source: Any, fields: Sequence[Any]) -> list[str]:
    """Return the names of the Arrow fields of columns whose names are not strings. Only pandas has such columns."""
    labels = source.columns if hasattr(source, "iloc") else [field.name for field in fields]
    return [field.name for field, label in zip(fields, labels) if not isinstance(label, str)]


def array_rows(source: Any) -> ArrayRows:
    check_not_masked(source, "the source")
    rows = source.tocsr() if hasattr(source, "tocsr") else np.asarray(source)
    if not rows.ndim or rows.dtype.kind not in "biufc":
        raise UsageError(
            f"the source of type {_type(source)} has no rows of numbers: expected a path, a table, or an array"
        )
    if not rows.shape[0]:
        raise UsageError(f"the source of type {_type(source)} has no rows: expected at least one")
    return ArrayRows(rows, rows.shape[0])


def _type(source: Any) -> str:
    return type(source).__qualname__
