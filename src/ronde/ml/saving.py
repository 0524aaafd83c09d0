"""Estimators in files that are safe to open from a stranger: no pickle, and nothing in them is executed.

A file is a zip archive of `estimator.json` (class, parameters, attributes) and the arrays that it refers to, in NumPy's
format. `load` makes objects only of the classes of `ronde.ml`, and their attributes have the names, dtypes and shapes
that a fit sets (`fitted_forms`). Members are stored uncompressed and their sizes are compared with that of the file
before they are read, and what the parsers make of a byte is limited, so a small file cannot take much memory.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import struct
import zipfile
from contextlib import suppress
from typing import IO, Any

import numpy as np

from ronde.errors import UsageError
from ronde.ml import ESTIMATORS
from ronde.ml.estimator_settings import apply_settings, described_settings
from ronde.ml.fitted_forms import find_wrong_attribute
from ronde.ml.plain_values import ArrayReader, decoded, encoded, write_arrays
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
    if not isinstance(name, str) or name not in ESTIMATORS:
        raise UsageError(f"its class is {name!r}: expected one of {', '.join(sorted(ESTIMATORS))}")
    kind = getattr(importlib.import_module(ESTIMATORS[name]), name)
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
