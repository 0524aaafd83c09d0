"""What happens if ranks are killed, never come, or make different calls: one clean error that names rank and host."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.torch.distributed.groups import default_group

from ronde.errors import (
    AbortedError,
    MismatchError,
    NotInitializedError,
    PeerError,
    PeerLostError,
    RondeError,
)
from ronde.testing import ranks

HOST = socket.gethostname()
NOTICED_S = 10.0  # a machine with much else to do takes its time; benchmarks show how long it really takes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def operation(name: str, group: Any, x: Any, size: int) -> Any:
    """Return the `Work` of an operation in which every rank needs every other one."""
    if name == "all_reduce":
        return dist.all_reduce(x, group=group, async_op=True)
    if name == "all_gather":
        return dist.all_gather([torch.empty_like(x) for _ in range(size)], x, group=group, async_op=True)
    if name == "all_to_all":
        return dist.all_to_all_single(torch.empty_like(x), x, group=group, async_op=True)
    return dist.barrier(group=group, async_op=True)


def send_until_an_error(x: Any, dest: int) -> None:
    """Send again and again: the group may know of a death a moment before the mailbox does."""
    for _ in range(1000):
        dist.send(x, dest)
        time.sleep(0.005)


def survive(folder: str, name: str, how: str) -> tuple[str, float]:
    """The last rank dies while the others are in an operation. Return the error and how long it took, in s."""
    with default_group(folder) as (rank, size):
        group = dist.new_group() if how == "group" else None
        x = torch.ones(30 * size)
        operation(name, group, x, size).wait()
        if rank == size - 1:
            time.sleep(0.2)
            Path(folder, "died").write_text(str(time.monotonic()))
            die()
        error: Any = None
        work = operation(name, group, x, size)
        try:
            if how == "future":
                work.get_future().wait()
            else:
                work.wait()
        except RuntimeError as caught:
            error = caught
        took_s = time.monotonic() - float(Path(folder, "died").read_text())
        assert how == "future" or isinstance(error, PeerLostError), repr(error)
        with pytest.raises(RuntimeError, match=f"rank {size - 1}"):  # and later ones at once
            dist.all_reduce(x, group=group)
        with pytest.raises(RuntimeError, match=f"rank {size - 1}"):
            dist.recv(x, size - 1)
        return str(error), took_s


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("all_reduce", "default"),
        ("all_reduce", "group"),
        ("all_reduce", "future"),
        ("all_gather", "default"),
        ("all_to_all", "group"),
        ("barrier", "default"),
    ],
)
def test_killed_in_a_collective(name: str, how: str, tmp_path: Path) -> None:
    with ranks.start(survive, 3, str(tmp_path), name, how) as job:
        outcomes = job.outcomes()
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback_text
        text, took_s = outcome.value
        assert "rank 2" in text
        assert HOST in text
        assert took_s < NOTICED_S


def killed_sender(folder: str) -> None:
    with default_group(folder) as (rank, size):
        dist.barrier()
        if rank == size - 1:
            time.sleep(0.1)
            die()
        with pytest.raises(RuntimeError, match=f"rank {size - 1} .*{HOST}|{HOST}.*rank {size - 1}"):
            dist.recv(torch.empty(3), size - 1)
        with pytest.raises(PeerLostError, match=f"rank {size - 1}"):  # at once, as for collectives
            dist.recv(torch.empty(1), 1 - rank)


def test_killed_before_it_sends(tmp_path: Path) -> None:
    with ranks.start(killed_sender, 3, str(tmp_path)) as job:
        for outcome in job.outcomes()[:2]:
            assert outcome.error is None, outcome.traceback_text


def different_calls(folder: str) -> list[str]:
    texts = []
    for count in range(4):
        with default_group(folder) as (rank, _):
            x = torch.ones(4 + rank) if count == 1 else torch.ones(4)
            try:
                if count == 2 and rank:
                    dist.barrier()
                elif count == 3:
                    dist.broadcast(x, rank)
                else:
                    dist.all_reduce(x.double() if count == 0 and rank else x)
            except MismatchError as error:
                texts.append(str(error))
    return texts


def test_different_calls(tmp_path: Path) -> None:
    for texts in ranks.run(different_calls, 2, str(tmp_path)):
        assert len(texts) == 4, texts
        assert "float64" in texts[0]
        assert "float32" in texts[0]
        assert "barrier" in texts[2]
        assert "allreduce" in texts[2].replace("-", "").replace("_", "")
        assert all("rank" in text for text in texts)


def never_comes(folder: str) -> str:
    """One rank makes no call, and lives: the others time out by the limit of the group, of a call or of a wait."""
    with default_group(folder, timeout_s=3.0) as (rank, size):
        if rank == size - 1:
            wait_for_files(folder, [f"timed-out-{each}" for each in range(size - 1)])
            return ""
        with pytest.raises(TimeoutError, match="3 s"):
            dist.recv(torch.empty(1), size - 1)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=100))
        with pytest.raises(RondeError) as caught:
            work.wait()
        Path(folder, f"timed-out-{rank}").touch()
        return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    with ranks.start(never_comes, 3, str(tmp_path)) as job:
        outcomes = job.outcomes()
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback_text
    texts = [outcome.value for outcome in outcomes[:2]]
    assert any(text.startswith("TimeoutError") for text in texts), texts
    for text in texts:
        assert "rank 2" in text, text
        assert HOST in text, text
        assert "allreduce" in text or "all_reduce" in text, text


class Reports(logging.Handler):
    """Leaves the stall reports of a rank as files."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "allreduce" in text:
            written = Path(self.folder, f"{os.getpid()}.part")
            written.write_text(text)
            written.rename(Path(self.folder, "report"))


def wait_for_report(folder: str) -> None:
    logging.getLogger("ronde").addHandler(Reports(folder))
    with default_group(folder) as (rank, size):
        if rank < size - 1:
            work = dist.all_reduce(torch.ones(3), async_op=True)
        wait_for_files(folder, ["report"])
        dist.group.WORLD.abort()
        if rank < size - 1:
            with pytest.raises(AbortedError):
                work.wait()


def test_the_report_names_a_rank_that_never_comes(tmp_path: Path) -> None:
    ranks.run(wait_for_report, 3, str(tmp_path), environ={"RONDE_STALL_WARNING": "0.3"})
    report = (tmp_path / "report").read_text()
    for part in ("rank 2", "allreduce", "test_failures.py"):
        assert part in report, f"{part!r} is not in: {report}"


def wait_for_files(folder: str, names: list[str]) -> None:
    """Return when there are such files. The limit only keeps a broken test from hanging."""
    give_up_s = time.monotonic() + 100
    while not all(Path(folder, name).exists() for name in names):
        assert time.monotonic() < give_up_s, f"there are no files {names}"
        time.sleep(0.02)


def late_member(folder: str) -> str:
    """A rank that never makes the group: the error of the others names it."""
    with default_group(folder) as (rank, size):
        if rank != 1:
            with pytest.raises(TimeoutError, match="for rank 1 to make a group") as caught:
                dist.new_group(timeout=timedelta(seconds=1))
            Path(folder, f"raised-{rank}").touch()
            return str(caught.value)
        wait_for_files(folder, [f"raised-{each}" for each in range(size) if each != 1])
        return ""


def test_a_rank_that_never_makes_the_group(tmp_path: Path) -> None:
    with ranks.start(late_member, 3, str(tmp_path)) as job:
        for outcome in job.outcomes():
            assert outcome.error is None, outcome.traceback_text


def after_the_end(folder: str) -> None:
    with default_group(folder) as (_, size):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        with pytest.raises(NotInitializedError, match="destroyed"):
            group.allreduce([torch.ones(2)], dist.AllreduceOptions())
        assert work.wait()
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total[0] == size


def test_calls_after_the_end(tmp_path: Path) -> None:
    ranks.run(after_the_end, 2, str(tmp_path))


def abort_one(folder: str) -> None:
    """Rank 0 aborts a group: operations of all its members raise. Other groups go on."""
    with default_group(folder) as (rank, size):
        group = dist.new_group()
        if rank == 0:
            group.abort()
            with pytest.raises(AbortedError, match="aborted"):
                dist.all_reduce(torch.ones(2), group=group)
        else:
            with pytest.raises(PeerError, match="rank 0"):
                dist.all_reduce(torch.ones(2), group=group)
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total[0] == size


def test_abort(tmp_path: Path) -> None:
    ranks.run(abort_one, 3, str(tmp_path))


def monitored(folder: str) -> list[str]:
    """`monitored_barrier`: first all ranks come, then rank 2 does not, then all again."""
    texts = []
    with default_group(folder) as (rank, _):
        world: Any = dist.group.WORLD
        group: Any = dist.new_group([0, 1, 2])
        for _ in range(3):
            world.monitored_barrier(timedelta(seconds=60))
            group.monitored_barrier()
        for wait_all_ranks in (False, True):
            if rank == 2:
                time.sleep(1)
            with pytest.raises(TimeoutError) as caught:
                group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks)
            texts.append(str(caught.value))
            dist.barrier()
        group.monitored_barrier(timedelta(seconds=60))
        if torch.__version__ >= "2.14":  # earlier ones allow it for Gloo alone
            dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
    return texts


def test_monitored_barrier(tmp_path: Path) -> None:
    outcomes = ranks.run(monitored, 3, str(tmp_path))
    for texts in outcomes:
        assert all("rank 2 did not come within 0.2 s" in text for text in texts), texts
