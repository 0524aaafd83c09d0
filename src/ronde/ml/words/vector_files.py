"""Files of word vectors in the two formats of the program word2vec, which gensim reads and writes, too.

Both begin with a line of two numbers: of words and of dimensions. In the text format, a line for each word follows: the
word and its numbers, with spaces between them. In the binary format, each word is followed by a space and its numbers
as little-endian float32, and perhaps a line feed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.trusted_files import create_anew

__all__ = ["read_vectors", "write_vectors"]

Vectors = NDArray[np.float32]
NUMBER = np.dtype("<f4")
LONGEST_WORD = 1 << 16  # bytes
LONGEST_LINE = 1 << 26
SPACE = re.compile(r"\s", re.ASCII)


def write_vectors(path: str | os.PathLike[str], words: Sequence[str], vectors: Vectors, binary: bool) -> None:
    """Write words and their vectors to a file, in place of one that exists.

    Raises ValueError if a word contains white space of ASCII, which the formats cannot express; OSError.
    """
    for word in words:
        if not word or SPACE.search(word):
            raise ValueError(
                f"the word {word!r} is empty or contains white space of ASCII, which separates words in these files: "
                "replace it, or use `save`, which keeps all words"
            )
    unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(create_anew(unfinished), "wb") as file:
            file.write(f"{len(words)} {vectors.shape[1]}\n".encode())
            for word, vector in zip(words, vectors):
                numbers = (
                    vector.astype(NUMBER).tobytes()
                    if binary
                    else " ".join(map(str, vector.tolist())).encode()
                )
                file.write(word.encode(errors="surrogatepass") + b" " + numbers + b"\n")
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def read_vectors(path: str | os.PathLike[str], binary: bool) -> tuple[list[str], Vectors]:
    """Return the words of a file and their vectors.

    Raises UsageError if the file has another format; OSError.
    """
    with open(path, "rb") as file:
        try:
            count, dimensions = map(int, file.readline(LONGEST_WORD).split())
            size = os.fstat(file.fileno()).st_size
            # Each number takes four bytes, or a digit and a space: a small file cannot ask for much memory.
            if count < 1 or dimensions < 1 or count * dimensions * (4 if binary else 2) > size:
                raise ValueError(f"{count} words of {dimensions} dimensions do not fit into {size} bytes")
            read = _read_binary if binary else _read_text
            words, vectors = read(file, count, dimensions)
        except ValueError as error:
            form = "binary" if binary else "text"
            raise UsageError(
                f"{os.fspath(path)} has not the {form} format of word2vec: {error}; binary={not binary} reads the "
                "other one"
            ) from None
    if len(set(words)) != len(words):
        raise UsageError(f"{os.fspath(path)} contains a word twice")
    return words, vectors


def _read_text(file: IO[bytes], count: int, dimensions: int) -> tuple[list[str], Vectors]:
    words, vectors = [], np.empty((count, dimensions), np.float32)
    for number in range(count):
        word, _, numbers = file.readline(LONGEST_LINE).rstrip(b"\r\n").partition(b" ")
        parts = numbers.split()
        if len(parts) != dimensions:
            raise ValueError(f"line {number + 2} has {len(parts)} numbers, and {dimensions} are expected")
        words.append(word.decode(errors="surrogatepass"))
        vectors[number] = np.array(parts, dtype=np.float32)
    return words, vectors


def _read_binary(file: IO[bytes], count: int, dimensions: int) -> tuple[list[str], Vectors]:
    words, vectors = [], np.empty((count, dimensions), np.float32)
    num_bytes, rest, place = dimensions * NUMBER.itemsize, file.read(), 0
    for number in range(count):
        end = rest.find(b" ", place, place + LONGEST_WORD)
        if end < 0 or end + 1 + num_bytes > len(rest):
            raise ValueError(f"the file ends in word {number + 1} of {count}")
        words.append(rest[place:end].lstrip(b"\n").decode(errors="surrogatepass"))
        vectors[number] = np.frombuffer(rest, NUMBER, dimensions, end + 1)
        place = end + 1 + num_bytes
    if rest[place:].strip():
        raise ValueError(f"there are more bytes than those of {count} words")
    return words, vectors
