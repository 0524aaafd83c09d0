"""`horovod.spark.common.store`: the stores of estimators, as `ronde.spark.RunStore`."""

from __future__ import annotations

from typing import Any

from ronde.data.parquet_files import DBFS, open_filesystem
from ronde.parquet.store import RunStore

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]


class Store(RunStore):
    """A RunStore with Horovod's names.

    `train_path`, `val_path`: the data for `fit_on_parquet` (default: folders in the store). `storage_options`: for
    fsspec. Other options of Horovod, such as `save_runs`, have no effect.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        *_: Any,
        storage_options: dict[str, Any] | None = None,
        **__: Any,
    ) -> None:
        super().__init__(prefix_path, **(storage_options or {}))
        self.prefix_path = self.url
        self._train_path, self._val_path = train_path, val_path

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for a path or URL."""
        kinds: dict[str, type[Store]] = {DBFS: DBFSLocalStore, "hdfs:": HDFSStore, "file:": LocalStore}
        other = FilesystemStore if "://" in prefix_path else LocalStore
        kind = next((kinds[start] for start in kinds if prefix_path.startswith(start)), other)
        return kind(prefix_path, *args, **kwargs)

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the data for training."""
        return (self._train_path or f"{self.url}/intermediate_train_data") + _suffix(idx)

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the data for validation."""
        return (self._val_path or f"{self.url}/intermediate_val_data") + _suffix(idx)

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return f"{self.url}/runs"

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return self.run(run_id).url

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder with this path."""
        files, name = open_filesystem(path, self.options)
        return bool(files.exists(name))

    def read(self, path: str) -> bytes:
        """Return the content of a file."""
        files, name = open_filesystem(path, self.options)
        content: bytes = files.cat_file(name)
        return content


class FilesystemStore(Store):
    """A store in any file system of fsspec."""


class LocalStore(Store):
    """A store in a folder of a local or mounted file system."""


class DBFSLocalStore(Store):
    """A store in the file system of Databricks, which is mounted as /dbfs."""


class HDFSStore(Store):
    """A store in HDFS."""

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not prefix_path.startswith("hdfs:"):
            server = f"{host or ''}{f':{port}' if port else ''}"
            prefix_path = f"hdfs://{server}/{prefix_path.lstrip('/')}"
        options = {"user": user} if user else {}
        super().__init__(prefix_path, storage_options=options, **kwargs)


def _suffix(idx: int | None) -> str:
    return "" if idx is None else f".{idx}"
