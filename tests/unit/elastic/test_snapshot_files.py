"""The file of a snapshot: what is damaged is noticed, and no pickle of another user is read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ronde.elastic.snapshot_files import SnapshotFile, read_snapshot_file
from ronde.errors import ProtocolError, UsageError

PART = {"model": {"weights": np.arange(5.0)}, "attributes": {"epoch": 3}}


def written(folder: Path, payloads: dict[str, object] | None = None) -> Path:
    path = folder / "file"
    SnapshotFile("part-whole", 7, payloads or PART).write(path)
    return path


class Program:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    found = read_snapshot_file(written(tmp_path), 7)
    assert found["attributes"] == {"epoch": 3}
    np.testing.assert_array_equal(found["model"]["weights"], np.arange(5.0))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_wrong_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    data = written(tmp_path).read_bytes()
    for position in (0, 20, 100, len(data) - 40, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(ProtocolError, match="is damaged: its checksum is wrong"):
            read_snapshot_file(tmp_path / "file", 7)
    for length in (0, 10, len(data) - 1):
        (tmp_path / "file").write_bytes(data[:length])
        with pytest.raises(ProtocolError, match="is damaged"):
            read_snapshot_file(tmp_path / "file", 7)


def test_the_file_of_another_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="contains commit 7"):
        read_snapshot_file(written(tmp_path), 8)


def test_the_memory_may_change_once_it_is_detached(tmp_path: Path) -> None:
    weights = np.zeros(1 << 19)
    file = SnapshotFile("part-whole", 7, {"weights": weights})
    pieces = file._pieces()
    begun = [next(pieces), next(pieces)]
    file.detach()
    weights += 1
    data = b"".join([*begun, *pieces])
    assert data.endswith(bytes(weights.nbytes))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_pickle_of_another_user_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"model": np.ones(2), "object": Program()})
    os.chown(path, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534, and this process runs as user 0"):
        read_snapshot_file(path, 7)
    assert not capsys.readouterr().out
    os.chown(written(tmp_path), 65534, -1)
    assert read_snapshot_file(path, 7)["attributes"] == {"epoch": 3}  # without a pickle it does no harm


def test_a_pickle_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    path = written(tmp_path, {"object": {"an": {1, 2}}})
    assert read_snapshot_file(path, 7) == {"object": {"an": {1, 2}}}
    path.chmod(0o666)
    with pytest.raises(UsageError, match="others may write to"):
        read_snapshot_file(path, 7)
