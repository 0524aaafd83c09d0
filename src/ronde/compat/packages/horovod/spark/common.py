"""`horovod.spark.common`: stores, backends, base classes and functions that Horovod's estimators share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ronde.compat.calls import with_horovod, with_horovods_words
from ronde.data.parquet_files import DBFS, open_filesystem
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.net.host import host_identity
from ronde.parquet.store import RunStore
from ronde.spark import torch_estimator
from ronde.spark.ml_params import EstimatorParams, ModelParams
from ronde.spark.torch_estimator import EstimatorBackend as Backend
from ronde.spark.torch_estimator import TorchEstimator as HorovodEstimator
from ronde.spark.torch_model import TorchModel as HorovodModel

from .. import add_modules  # noqa: TID252 - type checkers do not know a package horovod

__all__ = [
    "Backend",
    "EstimatorParams",
    "HorovodEstimator",
    "HorovodModel",
    "ModelParams",
    "SparkBackend",
]


class SparkBackend(torch_estimator.SparkBackend):
    """Runs an estimator's ranks as `ronde.spark.SparkBackend` does. In them Ronde is Horovod."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Return the results by rank."""
        with with_horovods_words("Spark tasks"):
            return super().run(with_horovod(fn), args, kwargs, env)


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


def is_databricks() -> bool:
    """Return whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in environment()


def host_hash(salt: str | None = None) -> str:
    """Return a text that is equal for two processes if and only if they are on the same host, and give one salt."""
    return hashlib.sha256(f"{host_identity('')}\0{salt or ''}".encode()).hexdigest()


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a list of `length` elements: that list, or a single element repeated. Raises UsageError for others."""
    if var is None:
        return None
    elements = var if isinstance(var, list) else [var]
    if len(elements) not in (1, length):
        raise UsageError(f"{var} has {len(elements)} elements: expected 1 or {length}")
    return elements * length if len(elements) == 1 else elements


def check_validation(validation: float | str | None, df: Any = None) -> None:
    """Raise UsageError unless `validation` is None, a fraction below 1, or the name of a column of the data frame."""
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise UsageError(
                f"validation={validation!r} is not a column of the data frame: it has {df.columns}"
            )
    elif validation is not None and not 0 <= validation < 1:
        raise UsageError(
            f"validation={validation} is invalid: expected a fraction below 1 or a column's name"
        )


def get_output_cols(input_df_schema: Any, output_cols: Sequence[str]) -> list[str]:
    """Return the names of the columns that a model's `transform` returns for a data frame with this schema."""
    return [*(field.name for field in input_df_schema.fields), *output_cols]


add_modules(
    __name__,
    backend=["Backend", "SparkBackend"],
    estimator=["HorovodEstimator", "HorovodModel"],
    params=["EstimatorParams", "ModelParams"],
    store=["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"],
    util=["check_validation", "get_output_cols", "host_hash", "is_databricks", "to_list"],
)
