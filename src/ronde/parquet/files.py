"""Which Parquet files a path stands for, and what their metadata say.

Files in one folder come in the order of their names, so that row numbers do not depend on the file system.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote

from ronde.errors import UsageError
from ronde.parquet.needs import need
from ronde.parquet.rows import RowGroup
from ronde.parquet.store import open_filesystem

__all__ = ["ParquetFileFacts", "arrow_filesystem", "describe_files", "find_files"]

THREADS = 8  # that read the ends of files, where the metadata are
_MAGIC = "*?["


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


def describe_files(
    url: str, options: dict[str, Any] | None = None, check: Callable[[ParquetFileFacts], object] | None = None
) -> list[ParquetFileFacts]:
    """Return what the metadata of the Parquet files say. `check` gets those of each file, and may raise an error.

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
        facts = ParquetFileFacts(name, groups, dict(zip(schema.names, schema.types)), _partition(name))
        if check is not None:
            check(facts)
        return facts

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
