"""Rows of Parquet files. Each task reads its own rows.

A row has the same number in all tasks: files are in the order of their names, and rows in the order of their file. The
number of rows comes from the metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from ronde.comqueue.column_rows import ColumnRows
from ronde.comqueue.columns import ColumnSelection, ColumnsOption
from ronde.errors import UsageError
from ronde.parquet.files import ParquetFileFacts, describe_files
from ronde.parquet.reader import ParquetReader, holds_numbers
from ronde.parquet.rows import Columns, RowGroup, spans_of

__all__ = ["parquet_rows"]

# The columns of a larger row group are read from the file in pieces, to save memory.
LARGE_GROUP_BYTES = 64 << 20
PIECE_BYTES = 1 << 18

_Constants = Mapping[str, Mapping[str, float]]  # by column and file


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
    first, _ = next(pieces.read(range(1), 1, LARGE_GROUP_BYTES))  # only the beginning of its row group
    selection.learn(first)
    return ColumnRows(pieces, selection, name, memory_limit)


class _ParquetPieces:
    """The columns of files. `parts`: row groups, with a reader for each file system; `constants`: columns in paths."""

    def __init__(self, parts: Sequence[tuple[ParquetReader, list[RowGroup]]], constants: _Constants) -> None:
        self._parts, self._constants = parts, constants
        sizes = [group.rows for _, groups in parts for group in groups]
        self.num_rows, self._largest_group = sum(sizes), max(sizes, default=0)

    def read(self, rows: range, piece_rows: int, row_bytes: int) -> Iterator[tuple[Columns, str]]:
        piece_bytes = PIECE_BYTES if self._largest_group * row_bytes > LARGE_GROUP_BYTES else 0
        before = 0
        for reader, groups in self._parts:
            for span in spans_of(groups, range(rows.start - before, rows.stop - before)):
                file = span.group.file
                for columns in reader.batches(span, piece_rows, piece_bytes):
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
