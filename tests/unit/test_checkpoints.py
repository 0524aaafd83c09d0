"""Checkpoints of several rounds in one folder, written by workers that may be late."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.checkpoints import Checkpoints
from ronde.errors import StaleRoundError, UsageError


class Worker:
    """A worker of some round, which opens the folder."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, job: str | None, number: int = 0
    ) -> None:
        for name, value in (("RONDE_JOB_ID", job), ("RONDE_ROUND", str(number))):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        self.checkpoints = Checkpoints(folder)

    def save(self, step: int, text: str = "state") -> None:
        with self.checkpoints.writing(step) as path:
            path.write_text(text)

    def latest(self) -> tuple[int, str] | None:
        found = self.checkpoints.latest()
        return (self.checkpoints.step_of(found), found.read_text()) if found else None


def test_the_next_round_goes_on_from_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "folder"
    first = Worker(folder, monkeypatch, "job")
    assert first.latest() is None
    for step in (5, 10, 15):
        first.save(step, f"after {step}")
    second = Worker(folder, monkeypatch, "job", 1)
    assert second.latest() == (15, "after 15")
    assert len(list(folder.glob("fence-*.step-*"))) == 2  # `keep`
    assert not list(folder.glob("draft-*"))


def test_a_worker_of_an_earlier_round_cannot_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Worker(tmp_path, monkeypatch, "job", 3)
    late.save(100, "of round 3")
    writing = late.checkpoints.writing(120)
    writing.__enter__().write_text("too late")
    current = Worker(tmp_path, monkeypatch, "job", 4)  # while the other one was frozen
    with pytest.raises(StaleRoundError, match=r"round 4 of this job now uses .* belongs to round 3"):
        writing.__exit__(None, None, None)
    assert current.latest() == (100, "of round 3")
    current.save(110)
    with pytest.raises(StaleRoundError, match="round 4"):
        late.save(120)
    with pytest.raises(StaleRoundError, match="round 4"):
        Worker(tmp_path, monkeypatch, "job", 3)  # one that has not even opened it before
    assert current.latest() == (110, "state")


def test_what_is_written_at_the_last_moment_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Worker(tmp_path, monkeypatch, "job", 3)
    late.save(900, "of round 3")
    current = Worker(tmp_path, monkeypatch, "job", 4)
    current.save(800, "of round 4")
    (tmp_path / "fence-000001.step-000000950").write_text("renamed after the last look")
    assert current.latest() == (800, "of round 4")


def test_all_ranks_of_a_round_share_its_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Worker(tmp_path, monkeypatch, "job", 2) for _ in range(3)]
    for step, worker in enumerate(ranks):
        worker.save(step)
    assert ranks[0].latest() == (2, "state")
    assert len([path for path in tmp_path.iterdir() if "." not in path.name]) == 1


def test_a_job_that_is_started_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Worker(tmp_path, monkeypatch, "monday", 7)
    before.save(70)
    again = Worker(tmp_path, monkeypatch, "tuesday", 0)
    assert again.latest() == (70, "state")
    again.save(80)
    assert Worker(tmp_path, monkeypatch, "tuesday", 1).latest() == (80, "state")
    with pytest.raises(StaleRoundError, match="another job, started later"):
        before.save(90)


def test_a_block_that_fails_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tmp_path, monkeypatch, "job")
    worker.save(1)
    with suppress(OSError), worker.checkpoints.writing(2) as path:
        path.write_text("half")
        raise OSError("the disk is full")
    assert worker.latest() == (1, "state")
    assert not list(tmp_path.glob("draft-*"))


def test_without_rounds_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Worker(tmp_path, monkeypatch, None), Worker(tmp_path, monkeypatch, None)
    one.save(1)
    other.save(2)
    one.save(3)
    assert other.latest() == (3, "state")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0 is invalid: expected 1 or more"):
        ronde.Checkpoints(tmp_path, keep=0)
    with pytest.raises(UsageError, match=r"other\.pt is not named like a checkpoint"):
        ronde.Checkpoints(tmp_path).step_of(tmp_path / "other.pt")


@pytest.mark.parametrize("step", [-1, 5.0, "5", None])
def test_a_step_under_which_no_checkpoint_would_be_found(tmp_path: Path, step: Any) -> None:
    checkpoints = Checkpoints(tmp_path)
    with (
        pytest.raises(UsageError, match=r"is invalid: expected a whole number from 0"),
        checkpoints.writing(step),
    ):
        pytest.fail("the program need not write what is not kept")
    assert list(tmp_path.glob("draft-*")) == []
    with checkpoints.writing(np.int64(5)) as path:
        path.write_text("state")
    assert checkpoints.at(5).read_text() == "state"


def save_by_torch(path: Path, count: int) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.zeros(count), path)


def save_by_numpy(path: Path, count: int) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(count))


def fill_and_read(path: Path, other: Path) -> None:
    path.write_bytes(bytes(shutil.disk_usage(path.parent).free))
    other.read_text()


@pytest.mark.root
@pytest.mark.parametrize(
    "save", [save_by_numpy, save_by_torch, lambda path, count: path.write_bytes(bytes(8 * count))]
)
def test_a_full_disk_is_named_and_costs_no_checkpoint(
    tmp_path: Path, save: Callable[[Path, int], None]
) -> None:
    """The errors of NumPy and PyTorch do not mention the disk."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=True)
    try:
        checkpoints = Checkpoints(tmp_path)
        with checkpoints.writing(3) as path:
            save(path, 1000)
        with pytest.raises(ZeroDivisionError) as other, checkpoints.writing(4):
            print(1 / 0)
        assert not hasattr(other.value, "__notes__")  # there is room
        with pytest.raises((OSError, RuntimeError)) as caught, checkpoints.writing(4) as path:
            save(path, 10**6)
        [note] = caught.value.__notes__
        assert note.startswith(
            f"The disk of {tmp_path} is full: the checkpoint of step 4 is not saved. Earlier"
        )
        with pytest.raises(FileNotFoundError) as elsewhere, checkpoints.writing(5) as path:
            fill_and_read(path, tmp_path.with_name("missing"))
        assert not hasattr(elsewhere.value, "__notes__")  # it is about another file
        assert [each.name for each in tmp_path.iterdir()] == ["fence-000000.step-000000003"]
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
