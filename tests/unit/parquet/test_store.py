"""The folder of a run: complete files or none, epochs in order, checkpoints never overwritten."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ronde.errors import StaleRoundError, UsageError

pytest.importorskip("fsspec", reason="fsspec is not installed here")
from ronde.data.parquet_files import open_filesystem
from ronde.parquet.store import RunStore


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_epochs_are_complete_or_not_there(kind: str, tmp_path: Path) -> None:
    folder = RunStore(tmp_path if kind == "folder" else f"memory:/{tmp_path}").run("one")
    assert folder.epochs() == []
    assert folder.read("data.json") is None
    for epoch in range(4):
        folder.add_epoch(epoch, lambda file: file.write(b"state"), {"epoch": epoch})

    def fail(file: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        folder.add_epoch(4, fail, {})
    again = pickle.loads(pickle.dumps(folder))
    assert again.epochs() == [0, 1, 2, 3]
    assert again.metrics(2) == {"epoch": 2}
    files, path = again.filesystem()
    kept = {name.rpartition("/")[2] for name in files.ls(path, detail=False)}
    assert kept == {f"epoch-00000{n}.json" for n in range(4)} | {"epoch-000002.pt", "epoch-000003.pt"}
    with pytest.raises(StaleRoundError, match="epoch 3 of run one"):
        folder.add_epoch(3, lambda file: file.write(b"other"), {})
    assert folder.read("epoch-000003.pt") == b"state"


def test_what_a_store_is_named(tmp_path: Path) -> None:
    assert RunStore("hdfs://name/runs/").url == "hdfs://name/runs"
    assert RunStore(str(tmp_path)).url == f"file://{tmp_path}"
    assert open_filesystem("dbfs:/runs")[1] == "/dbfs/runs"
    with pytest.raises(UsageError, match="cannot be opened"):
        open_filesystem("nosuch://runs")
    for bad in ("", "..", "a/b"):
        with pytest.raises(UsageError, match="run_id"):
            RunStore(tmp_path).run(bad)
