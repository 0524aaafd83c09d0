"""Rows of Parquet files, of which each task reads its own.

A row has the same number in all tasks: files come in the order of their names, and rows as in their file. The number of
rows follows from the metadata. Rows that do not fit in memory are read in each step, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from ronde.comqueue.columns import ColumnSelection, ColumnsOption
from ronde.comqueue.read_ahead import read_ahead
from ronde.errors import UsageError
from ronde.parquet.files import ParquetFileFacts, describe_files
from ronde.parquet.reader import ParquetReader, holds_numbers
from ronde.parquet.rows import Columns, spans_of
from ronde.process.memory import available_memory

__all__ = ["ParquetRows"]

BATCH_BYTES = 4 << 20  # of rows that are decoded at once
LEAST_BATCH, MOST_BATCH = 64, 1 << 16  # rows
WHOLE_BYTES = 64 << 20  # the columns of a larger row group are read from the file in pieces, to save memory
PIECE_BYTES = 1 << 18
BLOCKS_AHEAD = 4
MIB = 1 << 20
SHARE_OF_MEMORY = 0.5  # what the algorithm and its arrays need is unknown


class ParquetRows:
    """Rows of Parquet files as a source of data. Can be pickled.

    Raises UsageError for files without rows, and for columns that hold no numbers, or that one file lacks or has in
    another type.
    """

    def __init__(
        self,
        urls: Sequence[str],
        columns: ColumnsOption,
        options: Mapping[str, Any] | None = None,
        memory_limit: int | None = None,
    ) -> None:
        fsspec_options = dict(options or {})
        found = [describe_files(url, fsspec_options) for url in urls]
        files = list(chain.from_iterable(found))
        self._name = urls[0] if len(urls) == 1 else f"{urls[0]} and {len(urls) - 1} others"
        self._limit = memory_limit
        partition = _partition_values(files)
        numeric = [name for name, kind in files[0].types.items() if holds_numbers(kind)]
        known = list(dict.fromkeys([*files[0].types, *partition]))
        self._selection = ColumnSelection(columns, numeric, known, files[0].path)
        stored = [name for name in self._selection.names if name in files[0].types]
        if not stored:
            raise UsageError(
                f"columns={columns!r} are in no file of {self._name}, only in paths: add another column"
            )
        self._constants = {name: partition[name] for name in self._selection.names if name not in stored}
        _check_types(files, stored)
        self._parts = [
            (ParquetReader(url, stored, fsspec_options), [group for file in part for group in file.groups])
            for url, part in zip(urls, found)
        ]
        sizes = [group.rows for _, groups in self._parts for group in groups]
        self.num_rows, self._largest_group = sum(sizes), max(sizes, default=0)
        if not self.num_rows:
            raise UsageError(f"{self._name} has no rows: expected at least one")
        first, _ = next(self._pieces(range(1), 1, PIECE_BYTES))
        self._selection.learn(first)

    def __repr__(self) -> str:
        return f"<ParquetRows: {self.num_rows} rows of {self._name}>"

    def load(self, begin: int, end: int) -> Any:
        """Return rows as `read` describes them, from the row groups that hold them."""
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
        """Yield the rows of consecutive ranges."""
        all_rows = range(blocks[0].start, blocks[-1].stop) if blocks else range(0)
        row_bytes = self._selection.row_bytes
        batch_rows = min(max(BATCH_BYTES // max(1, row_bytes), LEAST_BATCH), MOST_BATCH)
        piece_bytes = PIECE_BYTES if self._largest_group * row_bytes > WHOLE_BYTES else 0
        pieces = self._pieces(all_rows, batch_rows, piece_bytes)
        columns: Columns = {}
        file, used, left = (
            "",
            0,
            0,
        )  # of the present piece: where it is from, and how many of its rows are taken or not
        for block in blocks:
            arrays, filled = self._selection.empty(len(block)), 0
            while filled < len(block):
                if not left:
                    columns, file = next(pieces)
                    used, left = 0, _row_count(columns)
                count = min(left, len(block) - filled)
                self._selection.fill(arrays, filled, columns, slice(used, used + count), file)
                filled, used, left = filled + count, used + count, left - count
            yield self._selection.result(arrays)

    def _pieces(self, rows: range, batch_rows: int, piece_bytes: int) -> Iterator[tuple[Columns, str]]:
        """Yield the columns of consecutive rows in pieces, each with the file that it is from."""
        before = 0
        for reader, groups in self._parts:
            for span in spans_of(groups, range(rows.start - before, rows.stop - before)):
                file = span.group.file
                for columns in reader.batches(span, batch_rows, piece_bytes):
                    yield self._with_constants(columns, file), file
            before += sum(group.rows for group in groups)

    def _with_constants(self, columns: Columns, file: str) -> Columns:
        """Return the columns together with those whose values stand in the path of the file."""
        rows = _row_count(columns)
        return {**columns, **{name: np.full(rows, value[file]) for name, value in self._constants.items()}}


def _row_count(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _partition_values(files: Sequence[ParquetFileFacts]) -> dict[str, dict[str, int] | dict[str, float]]:
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
