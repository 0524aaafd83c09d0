"""The store of an estimator: a folder that the driver and all workers reach by one URL, by fsspec.

Each run has a folder there:

    runs/RUN/data/ronde_part=train, =validation          what Spark has written
    runs/RUN/data.json                                   its row groups, written when the data are complete
    runs/RUN/training.pkl                                the model, the optimizer and the options
    runs/RUN/epoch-000003.pt, epoch-000003.json          the state after an epoch, and its metrics

1. A file is written under another name and renamed when it is complete.
2. The metrics of an epoch are written after its checkpoint: where they are, it is complete, and is never overwritten.
3. `training.pkl` is code. The driver sends the ranks its digest, and they run no other. A user who may write into
   the store can change the data and the weights of a run, but run no code in it: `torch.load` reads only weights.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from ronde.data.parquet_files import open_filesystem
from ronde.errors import StaleRoundError, UsageError

__all__ = ["RunFolder", "RunStore"]


KEPT_CHECKPOINTS = 2
_RUN_ID = re.compile(r"[\w.+=@-]+")
_METRICS = re.compile(r"epoch-(\d{6,})\.json")
_SCHEME = re.compile(r"[a-zA-Z][\w+.-]*:(?!\\)")


class RunStore:
    """A folder for the data and the checkpoints of runs, which the driver and all workers must reach.

        store = RunStore("hdfs:///user/me/ronde")

    Args:
        url: A path, or a URL of fsspec, such as `file:///shared/runs`, `hdfs://namenode/runs` or `s3://bucket/runs`
            (which needs `pip install s3fs`). `dbfs:/path` is read through the mount `/dbfs`.
        options: Passed to fsspec's file system, such as `anon=True` for S3.

    Raises:
        UsageError: The URL is empty.
    """

    def __init__(self, url: str | os.PathLike[str], **options: Any) -> None:
        text = os.fspath(url)
        if not text:
            raise UsageError("the store's URL is empty: expected a folder that all workers reach")
        self.url = text if _SCHEME.match(text) else "file://" + os.path.abspath(text)
        self.url = self.url.rstrip("/")
        self.options = options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def run(self, run_id: str) -> RunFolder:
        """Return the folder of a run, which may not exist yet.

        Args:
            run_id: The name of the run: letters, digits and any of `_ . + = @ -`.

        Raises:
            UsageError: The id contains other characters.
        """
        if not _RUN_ID.fullmatch(run_id) or run_id.strip(".") == "":
            raise UsageError(f"run_id={run_id!r} is invalid: expected letters, digits and any of _ . + = @ -")
        return RunFolder(self, run_id)


class RunFolder:
    """The folder of a run in a store. Can be pickled."""

    def __init__(self, store: RunStore, run_id: str) -> None:
        self.store, self.run_id = store, run_id
        self.url = f"{store.url}/runs/{run_id}"
        self._files: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}

    def filesystem(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the folder's path there."""
        if self._files is None:
            self._files = open_filesystem(self.url, self.store.options)
        return self._files

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none."""
        files, folder = self.filesystem()
        try:
            content: bytes = files.cat_file(f"{folder}/{name}")
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file; readers see all of it or nothing."""
        self._write(name, lambda file: file.write(content))

    def remove(self, *names: str) -> None:
        """Remove files and folders, if they are there."""
        files, folder = self.filesystem()
        for name in names:
            with suppress(FileNotFoundError):
                files.rm(f"{folder}/{name}", recursive=True)

    # Epochs

    def epochs(self) -> list[int]:
        """Return the numbers of the complete epochs, the newest last."""
        files, folder = self.filesystem()
        files.invalidate_cache()
        try:
            names = [path.rpartition("/")[2] for path in files.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _METRICS.fullmatch(name)))

    def metrics(self, epoch: int) -> dict[str, Any]:
        """Return the metrics of a complete epoch."""
        entry: dict[str, Any] = json.loads(self.read(f"epoch-{epoch:06}.json") or b"{}")
        return entry

    def add_epoch(self, epoch: int, save: Callable[[IO[bytes]], object], metrics: dict[str, Any]) -> None:
        """Write the checkpoint of an epoch, by `save(file)`, and its metrics; keep the last few checkpoints.

        Raises StaleRoundError if another job has written this epoch.
        """
        files, folder = self.filesystem()
        name = _checkpoint(epoch)
        if epoch in self.epochs():
            raise StaleRoundError(
                f"another job has written epoch {epoch} of run {self.run_id} into {self.url}: this process may save no "
                "more, and should end; a run_id is for one job at a time"
            )
        self._write(name, save)
        self.write(f"epoch-{epoch:06}.json", json.dumps(metrics).encode())
        for old in self.epochs()[:-KEPT_CHECKPOINTS]:
            with suppress(FileNotFoundError):
                files.rm_file(f"{folder}/{_checkpoint(old)}")

    def load_epoch(self, epoch: int, device: str = "cpu") -> dict[str, Any]:
        """Return the state that the checkpoint of an epoch holds: tensors and plain values."""
        import torch

        files, folder = self.filesystem()
        with files.open(f"{folder}/{_checkpoint(epoch)}", "rb") as file:
            state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        return state

    def _write(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        files, folder = self.filesystem()
        files.makedirs(folder, exist_ok=True)
        draft = f"{folder}/draft-{secrets.token_hex(8)}"
        try:
            with files.open(draft, "wb") as file:
                write(file)
                with suppress(OSError, AttributeError):  # a file of this machine
                    file.flush()
                    os.fsync(file.fileno())
            # Left by a job that was killed; HDFS does not rename onto a file.
            with suppress(FileNotFoundError):
                files.rm_file(f"{folder}/{name}")
            files.mv(draft, f"{folder}/{name}")
        except BaseException:
            with suppress(OSError):
                files.rm_file(draft)
            raise


def _checkpoint(epoch: int) -> str:
    return f"epoch-{epoch:06}.pt"
