"""A disk that does not answer: a named pipe without a writer, whose opening waits."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from ronde.process.disk import Disk

SHORT_NS = 5 * 10**7
HANGING_S = 60


def test_an_operation_returns_its_result_or_raises(tmp_path: Path) -> None:
    disk = Disk()
    assert disk.ask(lambda: os.listdir(tmp_path)) == []
    with pytest.raises(FileNotFoundError, match="nowhere"):
        disk.ask(lambda: os.listdir(tmp_path / "nowhere"))
    assert disk.ask(lambda: None) is None
    assert not disk.is_silent


def test_a_disk_that_does_not_answer_holds_up_once_and_takes_back_what_comes_too_late(tmp_path: Path) -> None:
    pipe, disk, late = tmp_path / "pipe", Disk(SHORT_NS), list[int]()
    os.mkfifo(pipe)

    def close(fd: int) -> None:
        os.close(fd)
        late.append(fd)

    with pytest.raises(OSError, match=r"the disk has not answered for 0\.05 s") as raised:
        disk.ask(lambda: os.open(pipe, os.O_RDONLY), close)
    assert raised.value.errno == errno.ETIMEDOUT
    asked: list[int] = []
    with pytest.raises(TimeoutError):
        disk.ask(lambda: asked.append(1))
    assert disk.is_silent
    assert not asked  # as long as the first question is open
    os.close(os.open(pipe, os.O_WRONLY))
    deadline = time.monotonic() + HANGING_S
    while disk.is_silent and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(late) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(late[0])
    assert disk.ask(lambda: 7) == 7
