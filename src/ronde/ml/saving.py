"""Estimators in files that are safe to open from a stranger: no pickle, and nothing in them is executed.

A file is a zip archive of `estimator.json` (class, parameters, attributes) and the arrays that it refers to, in NumPy's
format. `load` makes objects only of the classes of `ronde.ml`, and their attributes have the names, dtypes and shapes
that a fit sets (`fitted_forms`). Members are stored uncompressed and their sizes are compared with that of the file
before they are read, and what the parsers make of a byte is limited, so a small file cannot take much memory.

JSON's own types stand for themselves. All else is an object with one key, which says what it is:
{"array": 3} (number 3 of the file), {"scalar": 4}, {"texts": [...]}, {"tuple": [...]}, {"dict": [[key, value], ...]},
{"float": "nan"} and {"history": {name: the values of all records, as {"array": 4}}}.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from sklearn.utils.metadata_routing import MetadataRequest

from ronde.errors import UsageError
from ronde.ml import ESTIMATORS, RANKERS, TEXT_ESTIMATORS
from ronde.ml.fitted_forms import find_wrong_attribute
from ronde.ml.history import History
from ronde.trusted_files import create_anew

__all__ = ["from_bytes", "load", "save", "to_bytes"]

FORMAT = 2
DESCRIPTION = "estimator.json"
MOST_MEMBERS = 1000
LARGEST_DESCRIPTION = 16 << 20  # bytes
MOST_VALUES = 500_000  # in the description: each can take 30 times the memory of its text
# The last bytes of an archive without a comment: in large files a locator of more precise sizes, and the end record.
END_RECORD = struct.Struct("<4s16x4s4H2LH")
BYTES_OF_A_MEMBER = 200  # in the archive's directory, at most
NOT_SAVED = {"on"}  # says where a fit runs, which is no property of a model
PLAIN_KINDS = "biufUS"  # of dtypes: booleans, numbers, texts of fixed length
LONGEST_HEADER = 1000  # bytes
OUTPUT, REQUESTS = "output", "metadata_requests"  # keys of a file
OUTPUTS = ("default", "pandas", "polars")


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write the parameters and fitted attributes of an estimator to a file, in place of one that exists.

    Raises UsageError if a value has no plain form, OSError.
    """
    unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(create_anew(unfinished), "wb") as file:
            _write(estimator, file)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def to_bytes(estimator: Any) -> bytes:
    """Return what `save` would write to a file. Raises UsageError if a value has no plain form."""
    file = io.BytesIO()
    _write(estimator, file)
    return file.getvalue()


def _write(estimator: Any, file: IO[bytes]) -> None:
    name = type(estimator).__name__
    params = {key: value for key, value in estimator.get_params(deep=False).items() if key not in NOT_SAVED}
    attributes = {key: value for key, value in vars(estimator).items() if _is_fitted_attribute(key)}
    arrays: list[np.ndarray[Any, Any]] = []
    description = {
        "format": FORMAT,
        "class": name,
        "params": {key: encoded(value, f"{name}.{key}", arrays) for key, value in params.items()},
        "attributes": {key: encoded(value, f"{name}.{key}", arrays) for key, value in attributes.items()},
        **described_settings(estimator),
    }
    if wrong := find_wrong_attribute(estimator._fitted_forms, attributes):
        raise UsageError(f"{name} cannot be saved: {wrong}")
    text = json.dumps(description, allow_nan=False).encode()
    try:
        _check_description(text)
    except UsageError as error:
        raise UsageError(f"{name} cannot be saved: {error}") from None
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(DESCRIPTION, text)
        write_arrays(archive, arrays)


def load(path: str | os.PathLike[str]) -> Any:
    """Return the estimator that `save` wrote to a file. The file may be from a stranger: nothing in it is executed.

        model = ronde.ml.load("model.ronde")

    The parameter `on` is not in the file; set it before another fit.

    Args:
        path: The file.

    Raises:
        UsageError: The file is damaged, of a newer version of Ronde, or not one that `save` wrote.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        return _read(file, os.fspath(path))


def from_bytes(content: bytes, name: str) -> Any:
    """Return the estimator from the content of a file. `name`: of the file, for errors. Raises UsageError."""
    return _read(io.BytesIO(content), name)


def _read(file: IO[bytes], name: str) -> Any:
    try:
        size = file.seek(0, os.SEEK_END)
        _check_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            _check_members(archive, size)
            text = archive.read(DESCRIPTION)
            _check_description(text)
            return _estimator(json.loads(text), ArrayReader(archive))
    except UsageError as error:
        raise UsageError(f"{name} cannot be loaded: {error}") from None
    except Exception as error:  # a stranger's file can make the parsers raise anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the start of the file
            raise
        raise UsageError(
            f"{name} is not a saved estimator, or is damaged or incomplete ({type(error).__name__}: {error}): "
            "save the estimator again"
        ) from None


def _check_directory(file: IO[bytes], size: int) -> None:
    """Raise UsageError if the archive's directory, which `zipfile` reads as a whole, is larger than of a saved one."""
    file.seek(max(0, size - END_RECORD.size))
    locator, signature, _, _, _, members, directory_bytes, _, _ = END_RECORD.unpack(file.read())
    if signature != b"PK\5\6" or (locator == b"PK\6\7" and size <= zipfile.ZIP64_LIMIT):
        raise UsageError("it does not end like a saved estimator: it is damaged or incomplete")
    if members > MOST_MEMBERS:
        raise UsageError(f"it has {members} members, and at most {MOST_MEMBERS} are expected")
    if directory_bytes > MOST_MEMBERS * BYTES_OF_A_MEMBER:
        raise UsageError(
            f"the directory of its members has {directory_bytes} bytes, more than members can take"
        )


def _check_members(archive: zipfile.ZipFile, file_size: int) -> None:
    """Raise UsageError if the archive is not one that `save` writes, or could take more memory than the file has."""
    members = archive.infolist()
    if len(members) > MOST_MEMBERS:
        raise UsageError(f"it has {len(members)} members, and at most {MOST_MEMBERS} are expected")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UsageError("its members are compressed, which `save` does not do")
    if sum(member.file_size for member in members) > file_size:
        raise UsageError("its members claim to be larger than the file")


def _check_description(text: bytes) -> None:
    """Raise UsageError if Python's form of the description could take much memory."""
    if len(text) > LARGEST_DESCRIPTION:
        raise UsageError(f"{DESCRIPTION} exceeds {LARGEST_DESCRIPTION >> 20} MiB")
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise UsageError(f"{DESCRIPTION} consists of more than {MOST_VALUES} values")


def _estimator(description: Any, arrays: ArrayReader) -> Any:
    if description["format"] != FORMAT:
        raise UsageError(
            f"its format is {description['format']!r}, and this version of Ronde reads {FORMAT}: "
            "load it with the version that saved it, or a newer one"
        )
    name = description["class"]
    known = ESTIMATORS | TEXT_ESTIMATORS | RANKERS
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"its class is {name!r}: expected one of {', '.join(sorted(known))}")
    kind = getattr(importlib.import_module(known[name]), name)
    if not_saved := NOT_SAVED & description["params"].keys():
        raise UsageError(
            f"it sets {', '.join(not_saved)}, which `save` never writes: somebody else changed the file"
        )
    params = {key: decoded(value, arrays) for key, value in description["params"].items()}
    try:
        estimator = kind().set_params(**params)
        estimator._validate_params()
    except ValueError as error:  # a parameter that this version does not have, or an invalid value
        raise UsageError(str(error)) from None
    encoded_attributes = description["attributes"]
    if unknown := sorted(encoded_attributes.keys() - kind._fitted_forms.keys()):
        raise UsageError(f"{unknown[0]!r} is not the name of a fitted attribute of {name}")
    attributes = {key: decoded(value, arrays) for key, value in encoded_attributes.items()}
    if wrong := find_wrong_attribute(kind._fitted_forms, attributes):
        raise UsageError(wrong)
    for key, value in attributes.items():
        setattr(estimator, key, value)
    apply_settings(estimator, description)
    return estimator


def _is_fitted_attribute(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name.isidentifier()


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


def described_settings(estimator: Any) -> dict[str, Any]:
    """Return as JSON what `set_output` and `set_fit_request` have set; what they have not set is left out."""
    settings: dict[str, Any] = {}
    # scikit-learn has no public way to read what `set_output` has set.
    if output := vars(estimator).get("_sklearn_output_config"):
        settings[OUTPUT] = output["transform"]
    if "_metadata_request" in vars(estimator):
        requests = _requests_by_method(estimator.get_metadata_routing())
        settings[REQUESTS] = {method: dict(each.requests) for method, each in requests.items()}
    return settings


def apply_settings(estimator: Any, description: Mapping[str, Any]) -> None:
    """Set what `described_settings` has described.

    Raises UsageError for a value that the estimator does not take; AttributeError, TypeError or ValueError for what
    `described_settings` never returns.
    """
    if OUTPUT in description:
        if description[OUTPUT] not in OUTPUTS:
            raise UsageError(f"its output is {description[OUTPUT]!r}: expected one of {', '.join(OUTPUTS)}")
        estimator.set_output(transform=description[OUTPUT])
    if REQUESTS in description:
        estimator._metadata_request = _request_of(estimator, description[REQUESTS])


def _request_of(estimator: Any, requests: Mapping[str, Mapping[str, Any]]) -> MetadataRequest:
    """Return the requests of an estimator. The methods `set_fit_request` need metadata routing to be enabled."""
    request: MetadataRequest = estimator.get_metadata_routing()
    known = _requests_by_method(request)
    for method, aliases in requests.items():
        for name, alias in aliases.items():
            if method not in known or name not in known[method].requests:
                raise UsageError(f"{type(estimator).__name__} takes no metadata {name!r} in {method!r}")
            known[method].add_request(param=name, alias=alias)
    return request


def _requests_by_method(request: MetadataRequest) -> dict[str, Any]:
    return {name: each for name, each in vars(request).items() if hasattr(each, "add_request")}
