"""A process group whose members change while their processes go on."""

from __future__ import annotations

import itertools
import os
import pkgutil
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ronde.errors import AbortedError, PeerError, PeerLostError, TimeoutError, UsageError
from ronde.testing import faults, ranks
from ronde.testing.worker import tell

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
rtd: Any = pytest.importorskip("ronde.torch.distributed")


class Member:
    """One process, and a store where all tell their handles, as a launcher would collect them."""

    def __init__(self, path: Path) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = dist.FileStore(str(path), self.size)
        dist.init_process_group(
            "ronde",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
            pg_options=rtd.Options(enable_reconfigure=True),
        )

    def handles(self, name: str = "first") -> list[str]:
        self.store.set(f"{name}/{self.rank}", rtd.get_reconfigure_handle())
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.size)]

    def wait_for_all(self, name: str) -> None:
        self.handles(name)


def total() -> float:
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    return float(tensor[0])


def error_of(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def change_members(path: Path) -> list[Any]:
    member = Member(path)
    handles = member.handles()
    rtd.reconfigure(1, handles)
    seen: list[Any] = [(dist.get_rank(), dist.get_world_size(), total())]
    if member.rank != 1:
        rtd.reconfigure(2, [handles[2], handles[0]])
        seen.append((dist.get_rank(), dist.get_world_size(), total()))
    member.wait_for_all("apart")
    rtd.reconfigure(3, set(handles))
    everyone = [None] * member.size
    dist.all_gather_object(everyone, dist.get_rank())
    seen.append((dist.get_world_size(), total(), everyone))
    dist.destroy_process_group()
    return seen


def test_members_leave_and_come_back(tmp_path: Path) -> None:
    first, second, third = ranks.run(change_members, 3, tmp_path / "store")
    assert [each[0] for each in (first, second, third)] == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    assert first[1] == (1, 2, 3.0)  # a list has the members by rank
    assert third[1] == (0, 2, 3.0)
    assert [each[-1] for each in (first, second, third)] == [(3, 6.0, [0, 1, 2])] * 3


def survive(path: Path) -> list[Any]:
    member = Member(path)
    handles = member.handles()
    rtd.reconfigure(1, handles)
    pair = dist.new_group([0, 1])
    assert total() == 6
    if member.rank == 2:
        tell()
    while True:
        try:
            total()
        except PeerLostError as error:
            lost = error
            break
    mine = os.getpid()
    rtd.reconfigure(2, handles[:2])
    seen = [lost.rank, dist.get_world_size(), total(), os.getpid() == mine]
    # Another group of the first generation still works: its members live.
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    dist.destroy_process_group()
    return [*seen, float(tensor)]


def test_survivors_go_on_after_a_loss(tmp_path: Path) -> None:
    with ranks.start(survive, 3, tmp_path / "store") as job:
        job.told(2)
        faults.kill(job.pids[2])
        outcomes = job.outcomes()
    assert [outcomes[rank].value for rank in (0, 1)] == [[2, 2, 3.0, True, 2.0]] * 2


def abort_and_reconfigure(path: Path) -> list[Any]:
    member = Member(path)
    handles = member.handles()
    errors = [type(error_of(total))]
    rtd.reconfigure(1, handles)
    waiting = torch.zeros(1)
    work = dist.irecv(waiting, 1 - dist.get_rank())
    rtd.reconfigure(2, handles)
    errors.append(type(error_of(work.wait)))
    member.wait_for_all("both have the second generation")
    dist.group.WORLD.abort()
    errors.append(type(error_of(total)))
    rtd.reconfigure(3, handles)
    assert total() == 3
    ones = torch.ones(5)
    (summed,) = dist.all_reduce(ones, async_op=True).get_future().wait()
    assert summed.tolist() == [2.0] * 5
    pair = dist.new_group()
    dist.all_reduce(ones, group=pair)
    dist.destroy_process_group()
    return errors


def test_pending_work_of_the_last_generation_raises_and_an_aborted_group_starts_again(tmp_path: Path) -> None:
    found = ranks.run(abort_and_reconfigure, 2, tmp_path / "store")
    for before, pending, aborted in found:
        assert issubclass(before, UsageError)
        assert issubclass(pending, PeerError)  # the own end of the generation, or the other's
        assert issubclass(aborted, AbortedError)


def misuse(path: Path) -> list[str]:
    member = Member(path)
    handles = member.handles()
    rtd.reconfigure(1, handles)
    texts = [
        str(error_of(call))
        for call in (
            lambda: rtd.reconfigure(1, handles),
            lambda: rtd.reconfigure(2, [handles[1 - member.rank]]),
            lambda: rtd.reconfigure(3, [*handles, "nowhere"]),
            lambda: rtd.reconfigure(4, handles * 2),
        )
    ]
    assert total() == 3  # nothing has changed
    dist.barrier()
    if member.rank == 0:
        late = error_of(lambda: rtd.reconfigure(5, handles, timeout=timedelta(seconds=1)))
        assert isinstance(late, TimeoutError)
        texts.append(str(late))
        assert late.missing == (1,)
    member.wait_for_all("late")
    rtd.reconfigure(6, handles)
    assert total() == 3
    dist.destroy_process_group()
    return texts


def test_mistakes_are_named_and_change_nothing(tmp_path: Path) -> None:
    texts, _ = ranks.run(misuse, 2, tmp_path / "store")
    for part, text in zip(
        ("already used", "not among the handles", "not a handle", "are the same", "rank 1"),
        texts,
        strict=True,
    ):
        assert part in text


def many_generations(path: Path) -> list[int]:
    member = Member(path)
    handles = member.handles()
    counts = []
    for uuid in range(60):
        rtd.reconfigure(uuid, handles)
        assert total() == 3
        if uuid % 20 == 19:
            dist.barrier()
            counts.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    dist.destroy_process_group()
    return counts


def test_generations_leave_nothing(tmp_path: Path) -> None:
    for counts in ranks.run(many_generations, 2, tmp_path / "store"):
        assert max(counts) - min(counts) <= 2, counts


def reconfigure_and_sum(uuid: int, handles: list[str], seconds: float) -> None:
    """A member can be connected to all others before it learns that one of them is not."""
    rtd.reconfigure(uuid, handles, timeout=timedelta(seconds=seconds))
    total()


# Where a member can end: (the module of a function that every member calls to make a generation, the function, the
# call of it at which the member ends)
STEPS = {
    "connections": ("ronde.comm.bootstrap", "open_connections", 1),
    "the first connection": ("ronde.net.connections._Opening", "_establish", 1),
    "the second connection": ("ronde.net.connections._Opening", "_establish", 2),
    "memory of the world": ("ronde.comm.communicator_factory", "share_segment", 1),
    "memory of the mailbox": ("ronde.comm.communicator_factory", "share_segment", 2),
}


def ending_at(step: str, sign: int) -> Any:
    """Send this process a signal before a step."""
    where, name, number = STEPS[step]
    owner = pkgutil.resolve_name(where)
    original, calls = getattr(owner, name), itertools.count(1)

    def end_at_step(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), sign)
        return original(*arguments, **named)

    return mock.patch.object(owner, name, end_at_step)


def lose_one_in_every_step(path: Path) -> list[tuple[str, Any]]:
    """In every step the last member dies; the others reconfigure again without it."""
    member = Member(path)
    members = member.handles()
    errors = []
    for uuid, step in enumerate(STEPS):
        ends = ending_at(step, signal.SIGKILL) if member.rank == len(members) - 1 else nullcontext()
        with ends:
            error = error_of(partial(reconfigure_and_sum, uuid, members, 60))
        errors.append((step, error))
        del members[-1]
    rtd.reconfigure(len(STEPS), members)
    assert total() == 3
    return errors


@pytest.mark.slow
def test_members_name_the_one_that_dies_while_they_connect(tmp_path: Path) -> None:
    size = len(STEPS) + 2
    with ranks.start(lose_one_in_every_step, size, tmp_path / "store") as job:
        outcomes = job.outcomes()
    for rank in (0, 1):
        for number, (step, error) in enumerate(outcomes[rank].value):
            victim = size - 1 - number
            assert isinstance(error, PeerError), step
            assert re.search(rf"\branks? .*\b{victim}\b", str(error)), (step, error)


def stop_one_in_some_steps(path: Path) -> list[Any]:
    """A member stops in a step; the others end in time. Then it goes on, and all reconfigure again."""
    member = Member(path)
    handles = member.handles()
    member.store.set(f"pid {member.rank}", str(os.getpid()))
    errors = []
    for uuid, (step, victim) in enumerate(STOPS):
        ends = ending_at(step, signal.SIGSTOP) if member.rank == victim else nullcontext()
        with ends:
            error = error_of(partial(reconfigure_and_sum, uuid, handles, 3))
        member.store.set(f"ended {uuid}/{member.rank}", b"")
        if member.rank == 1:
            member.store.get(f"ended {uuid}/{2 - victim}")
            os.kill(int(member.store.get(f"pid {victim}")), signal.SIGCONT)
        member.wait_for_all(str(uuid))
        errors.append(error)
    rtd.reconfigure(len(STOPS), handles)
    assert total() == 6
    dist.destroy_process_group()
    return errors


STOPS = [("connections", 0), ("memory of the mailbox", 0), ("the first connection", 2)]


@pytest.mark.slow
def test_members_do_not_wait_longer_than_the_timeout_for_one_that_stops_while_they_connect(
    tmp_path: Path,
) -> None:
    found = ranks.run(stop_one_in_some_steps, 3, tmp_path / "store")
    for number, (step, victim) in enumerate(STOPS):
        for rank in {0, 1, 2} - {victim}:
            error = found[rank][number]
            assert isinstance(error, PeerError), step
            assert re.search(rf"\branks? .*\b{victim}\b", str(error)), (step, error)
