"""Values of estimators as JSON and arrays: what the files of `ronde.ml.saving` consist of.

JSON's own types stand for themselves. All else is an object with one key, which says what it is:
{"array": 3} (number 3 of the file), {"scalar": 4}, {"texts": [...]}, {"tuple": [...]}, {"dict": [[key, value], ...]},
{"float": "nan"} and {"history": {name: the values of all records, as {"array": 4}}}.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.history import History

__all__ = ["ArrayReader", "decoded", "encoded", "write_arrays"]

PLAIN_KINDS = "biufUS"  # of dtypes: booleans, numbers, texts of fixed length
LONGEST_HEADER = 1000  # bytes


def encoded(value: Any, name: str, arrays: list[NDArray[Any]]) -> Any:
    """Return a value as JSON; append the arrays in it to `arrays`. `name`: of the value, for errors.

    Raises UsageError if it has no such form.
    """
    match value:
        case np.ndarray() if value.dtype.kind == "O" and all(isinstance(each, str) for each in value.flat):
            return {"texts": value.tolist()}
        case np.ndarray() | np.generic() if value.dtype.kind in PLAIN_KINDS:
            arrays.append(np.asarray(value))
            return {"array" if isinstance(value, np.ndarray) else "scalar": len(arrays) - 1}
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encoded(each, name, arrays) for each in value]
        case tuple():
            return {"tuple": [encoded(each, name, arrays) for each in value]}
        case dict():
            pairs = [[encoded(key, name, arrays), encoded(each, name, arrays)] for key, each in value.items()]
            return {"dict": pairs}
        case History():
            return {
                "history": {key: encoded(column, name, arrays) for key, column in _columns(value).items()}
            }
    raise UsageError(
        f"{name} is of type {type(value).__qualname__}, which a file of an estimator cannot contain: expected numbers, "
        "texts, arrays of these, lists, tuples or dicts"
    )


def decoded(value: Any, arrays: ArrayReader) -> Any:
    """Return the value that `encoded` has encoded. Raises ValueError, TypeError or LookupError if it has not."""
    if isinstance(value, list):
        return [decoded(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "array":
            return arrays.read(content)
        case "scalar":
            return arrays.read(content)[()]
        case "texts":
            return _texts(content)
        case "tuple":
            return tuple(decoded(each, arrays) for each in content)
        case "dict":
            return {decoded(key, arrays): decoded(each, arrays) for key, each in content}
        case "float":
            return float(content)
        case "history":
            return _history({key: decoded(column, arrays) for key, column in content.items()})
    raise ValueError(f"unknown kind of value: {kind!r}")


def _columns(history: History) -> dict[str, NDArray[Any]]:
    """Return the values of all records by their names: a fit may take so many steps that JSON would be too large."""
    return {key: np.array([record[key] for record in history]) for key in (history[0] if history else ())}


def _history(columns: Mapping[str, NDArray[Any]]) -> History:
    if any(column.ndim != 1 or column.dtype.kind not in "biuf" for column in columns.values()):
        raise ValueError("a history consists of columns of numbers")
    values = [column.tolist() for column in columns.values()]
    return History(dict(zip(columns, record)) for record in zip(*values, strict=True))


def _texts(content: Any) -> NDArray[Any]:
    texts = np.array(content, dtype=object)
    if not all(isinstance(each, str) for each in texts.flat):
        raise ValueError("an array of texts contains something else")
    return texts


def write_arrays(archive: zipfile.ZipFile, arrays: Sequence[NDArray[Any]]) -> None:
    """Write arrays as members of an archive, under their numbers. Raises OSError."""
    for number, array in enumerate(arrays):
        with archive.open(_member(number), "w", force_zip64=True) as file:
            npy.write_array(file, array, version=(1, 0), allow_pickle=False)


class ArrayReader:
    """Reads arrays that are members of an archive, which need not be what they claim; each once."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._unread = set(range(len(archive.infolist())))

    def read(self, number: Any) -> NDArray[Any]:
        """Return the array of that number. Raises LookupError, ValueError, BadZipFile."""
        if type(number) is not int or number not in self._unread:
            raise ValueError(f"{number!r} is not the number of an array, or is there twice")
        self._unread.remove(number)
        data = self._archive.read(_member(number))
        file = io.BytesIO(data)
        if npy.read_magic(file) != (1, 0):
            raise ValueError(f"array {number} has an unknown version")
        shape, is_fortran, dtype = npy.read_array_header_1_0(file, max_header_size=LONGEST_HEADER)
        if dtype.kind not in PLAIN_KINDS or dtype.subdtype is not None or dtype.itemsize == 0:
            raise ValueError(f"array {number} has the dtype {dtype}")
        if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
            raise ValueError(f"array {number} of shape {shape} and dtype {dtype} has another number of bytes")
        flat = np.frombuffer(data, dtype, offset=file.tell()).astype(dtype.newbyteorder("="))
        return flat.reshape(shape, order="F" if is_fortran else "C")


def _member(number: int) -> str:
    return f"arrays/{number}.npy"
