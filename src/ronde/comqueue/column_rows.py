"""Rows of tables that are read in pieces: kept in memory if they fit, otherwise streamed block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ronde.comqueue.buffers import Buffers
from ronde.comqueue.columns import ColumnSelection
from ronde.comqueue.read_ahead import read_ahead
from ronde.parquet.rows import Columns
from ronde.process.resources import available_memory

__all__ = ["ColumnPieces", "ColumnRows"]

PIECE_BYTES = 4 << 20
LEAST_PIECE, MOST_PIECE = 64, 1 << 16  # rows
BLOCKS_AHEAD = 4
MIB = 1 << 20
SHARE_OF_MEMORY = 0.5  # what the algorithm and its arrays need is unknown


class ColumnPieces(Protocol):
    """Where the columns of a table come from. Can be pickled. `num_rows`: how many rows it has."""

    num_rows: int

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
