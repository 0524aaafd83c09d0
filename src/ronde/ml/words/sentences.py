"""Sentences as shards: texts whose number and bounds depend on the sentences only, not on the tasks.

A shard is an array of bytes. In the shards of a file, white space ends words, and so do U+001C to U+001F; a line feed
ends a sentence. In those of other sentences, U+001F ends words and U+001E a sentence, so that words may contain white
space.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.data.needs import need
from ronde.data.parquet_files import ParquetReader, RowGroup, describe_files, spans_of
from ronde.errors import UsageError

__all__ = ["ParquetShards", "Shard", "TextShards", "as_shards", "shards_of_sentences"]

Shard = NDArray[np.uint8]

WORD_END, SENTENCE_END = "\x1f", "\x1e"
BATCH = 10_000  # sentences that are joined at once
LEAST_BYTES = 256  # of a shard
HAS_SEPARATOR = "a word contains the character U+001E or U+001F, which separate words here: replace it"
EXPECTED = (
    'expected an iterable of lists of words, such as [["a", "sentence"]], or the path of a file of lines'
)


@dataclass(frozen=True)
class TextShards:
    """A file of UTF-8, one sentence on each line, as a source of shards, which each task reads where it runs."""

    path: str
    num_rows: int
    size: int

    def load(self, begin: int, end: int) -> list[Shard]:
        """Return consecutive shards. Raises OSError; ValueError if the size of the file has changed."""
        with open(self.path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != self.size:
                raise ValueError(
                    f"{self.path} has {size} bytes here, and {self.size} where the fit began: tasks must read the same "
                    "file, and the file must not change during the fit"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return cut(content, self.num_rows, range(begin, end), b"\n")


@dataclass(frozen=True)
class ParquetShards:
    """A column of Parquet files as a source of shards, which each task reads where it runs.

    `size`: the number of all rows, each of which is a text or a list of words.
    """

    url: str
    column: str
    groups: Sequence[RowGroup]
    is_lines: bool
    num_rows: int
    size: int

    def load(self, begin: int, end: int) -> list[Shard]:
        """Return consecutive shards. Raises UsageError if a file cannot be found; ValueError for invalid words."""
        return [np.frombuffer(self._text(number), np.uint8) for number in range(begin, end)]

    def _text(self, number: int) -> bytes:
        reader = ParquetReader(self.url, [self.column])
        compute = need("pyarrow", "pyarrow.compute")
        first, end = (self.size * each // self.num_rows for each in (number, number + 1))
        separator, pieces = "\n" if self.is_lines else SENTENCE_END, []
        for span in spans_of(self.groups, range(first, end)):
            rows = reader.read_table(span).column(self.column)
            if not self.is_lines:
                has_separator = compute.match_substring_regex(compute.list_flatten(rows), "[\x1e\x1f]")
                if compute.any(has_separator).as_py():
                    raise ValueError(HAS_SEPARATOR)
            texts = rows if self.is_lines else compute.binary_join(rows, WORD_END)
            pieces.append("".join([text + separator for text in texts.drop_null().to_pylist()]))
        return "".join(pieces).encode()


Shards = TextShards | ParquetShards | list[Shard]


def as_shards(sentences: Any, count: int, column: str | None = None) -> tuple[Shards, bool]:
    """Return the shards of sentences, and whether they are lines of text.

    Args:
        sentences: The path of a file, or an iterable of lists of words.
        count: How many shards there are, unless they would be very small.
        column: That of Parquet files; None: `sentences` are no Parquet files.

    Raises:
        ValueError: The sentences have another form, or there are none.
        UsageError: There are no Parquet files, or their column has another type.
        OSError: The file cannot be read.
    """
    if column is not None:
        parquet = _parquet_shards(os.fspath(sentences), column, count)
        return parquet, parquet.is_lines
    if not isinstance(sentences, str | os.PathLike):
        return shards_of_sentences(sentences, count), False
    path = os.path.abspath(os.fspath(sentences))
    size = os.path.getsize(path)
    if not size:
        raise ValueError(f"{path} is empty: expected a sentence on each line")
    return TextShards(path, _shard_count(size, count), size), True


def _parquet_shards(url: str, column: str, count: int) -> ParquetShards:
    files = describe_files(url)
    types = {str(file.types.get(column)).replace("large_", "") for file in files}
    is_lines = types == {"string"}
    if not is_lines and not all(each.startswith("list<") and each.endswith(": string>") for each in types):
        raise UsageError(
            f"the column {column!r} of {url} has the type {' or '.join(sorted(types))}: expected texts or lists of "
            "texts"
        )
    groups = [group for file in files for group in file.groups]
    size = sum(group.rows for group in groups)
    if not size:
        raise ValueError(f"{url} has no rows: expected a sentence in each of them")
    return ParquetShards(url, column, groups, is_lines, min(count, size), size)


def shards_of_sentences(sentences: Iterable[Sequence[str]], count: int) -> list[Shard]:
    """Return the shards of lists of words. Raises ValueError if they are none."""
    try:
        rest = iter(sentences)
    except TypeError:
        raise ValueError(f"the sentences are of type {type(sentences).__qualname__}: {EXPECTED}") from None
    pieces = []
    while batch := list(islice(rest, BATCH)):
        pieces.append(_joined(batch))
    text = b"".join(pieces)
    if not text:
        raise ValueError(f"there are no sentences: {EXPECTED}")
    shards = _shard_count(len(text), count)
    return cut(text, shards, range(shards), SENTENCE_END.encode())


def _joined(batch: list[Sequence[str]]) -> bytes:
    """Return the text of some sentences. No loop here is one of Python over words."""
    if wrong := set(map(type, batch)) & {str, bytes}:
        raise ValueError(f"a sentence is of type {wrong.pop().__name__}, and not a list of words: {EXPECTED}")
    try:
        lengths = list(map(len, batch))
        text = SENTENCE_END.join(map(WORD_END.join, batch)) + SENTENCE_END
    except TypeError as error:
        raise ValueError(f"a sentence is not a list of words ({error}): {EXPECTED}") from None
    inner_ends = sum(lengths) - len(lengths) + lengths.count(0)
    if text.count(WORD_END) != inner_ends or text.count(SENTENCE_END) != len(batch):
        raise ValueError(HAS_SEPARATOR)
    return text.encode(errors="surrogatepass")


def _shard_count(size: int, count: int) -> int:
    return max(1, min(count, size // LEAST_BYTES))


def cut(text: bytes | mmap.mmap, count: int, numbers: range, sentence_end: bytes) -> list[Shard]:
    """Return some of the shards of a text: those sentences belong to a shard that begin in its part of the bytes."""

    def begin_of(number: int) -> int:
        place = len(text) * number // count
        if number in (0, count):
            return place
        found = text.find(sentence_end, place - 1)
        return len(text) if found < 0 else found + 1

    bounds = [begin_of(number) for number in range(numbers.start, numbers.stop + 1)]
    return [np.frombuffer(text[begin:end], np.uint8) for begin, end in zip(bounds, bounds[1:])]
