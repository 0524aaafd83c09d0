from __future__ import annotations

import grp
import os
import pwd
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import AllReduce, ComContext, ComputeFunction, IterationStep, IterativeComQueue, iterate
from ronde.comqueue.checkpointing import (
    CheckpointPlace,
    DriverMemory,
    FolderPlace,
    MemoryPlace,
    StoreCheckpoints,
    latest_step,
)
from ronde.errors import RemoteError, UsageError
from ronde.stores.memory import MemoryStore

THREE = "threads:3"


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointPlace]:
    with ExitStack() as stack:
        yield MemoryPlace(2, stack) if request.param == "memory" else FolderPlace(str(tmp_path / "new"))


def test_the_last_two_checkpoints_of_each_task(place: CheckpointPlace) -> None:
    mine, others = place.open(0), place.open(1)
    assert mine.latest() == 0
    for step, data in [(2, b"two, the longest"), (4, b"four"), (6, b"")]:
        mine.save(step, data)
    assert (mine.latest(), mine.load(4), mine.load(6)) == (6, b"four", b"")
    assert others.latest() == 0
    again = place.open(0)
    assert again.latest() == 6
    again.clear()
    assert place.open(0).latest() == 0


def test_an_incomplete_checkpoint_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    class Step(int):
        def to_bytes(self, *_: Any, **__: Any) -> bytes:
            raise Killed

    with ExitStack() as stack:
        checkpoints = MemoryPlace(1, stack).open(0)
        checkpoints.save(1, b"one")
        checkpoints.save(2, b"two")
        with pytest.raises(Killed):  # after the data, before the number of the step
            checkpoints.save(Step(3), b"three")
        assert (checkpoints.latest(), checkpoints.load(2)) == (2, b"two")


def test_the_driver_carries_checkpoints_from_one_store_to_the_next() -> None:
    large, memory, first, second = bytes(range(256)) * 8192, DriverMemory(2), MemoryStore(), MemoryStore()
    memory.offer_to(first)
    mine, others = StoreCheckpoints(first, 0), StoreCheckpoints(first, 1)
    assert mine.latest() == 0
    for step, data in [(2, large), (4, b"four"), (6, large[1:])]:
        mine.save(step, data)
    others.save(4, b"others")
    memory.collect_from(first)
    memory.offer_to(second)
    mine, others = StoreCheckpoints(second, 0), StoreCheckpoints(second, 1)
    assert (mine.latest(), mine.load(6), mine.load(4)) == (6, large[1:], b"four")
    assert (others.latest(), others.load(4)) == (4, b"others")
    mine.clear()
    others.clear()
    assert second.num_keys() == 0


def test_a_checkpoint_that_a_task_could_not_complete_does_not_leave_the_store() -> None:
    class Killed(BaseException):
        pass

    class Step(int):
        def __str__(self) -> str:
            raise Killed

    store, memory = MemoryStore(), DriverMemory(1)
    checkpoints = StoreCheckpoints(store, 0)
    checkpoints.save(1, b"one")
    checkpoints.save(2, b"two")
    with pytest.raises(Killed):  # after the data, before the number of the step
        checkpoints.save(Step(3), b"three")
    memory.collect_from(store)
    memory.offer_to(store := MemoryStore())
    assert StoreCheckpoints(store, 0).steps() == [2]


def failing_queue(folder: Path, seen: list[int], fails_at: int) -> IterativeComQueue:
    def count(context: ComContext) -> None:
        if context.task_id == 0:
            seen.append(context.step_no)
        if context.task_id == 1 and context.step_no == fails_at:
            raise ValueError("no luck")
        total = context.get_obj("total") if context.contains_obj("total") else 0
        context.put_obj("total", total + int(context.get_obj("rows").sum()) * context.step_no)

    queue = IterativeComQueue().init_with_partitioned_data("rows", np.arange(6)).add(count)
    queue.add(lambda context: context.put_obj("sum", context.get_obj("total"))).add(AllReduce("sum"))
    queue.set_max_iter(10).set_checkpoint(every=3, folder=str(folder))
    return queue.close_with(lambda context: context.get_obj("sum"))


def test_a_run_goes_on_where_an_earlier_one_has_failed(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(RemoteError, match="no luck"):
        failing_queue(tmp_path, seen, fails_at=8).exec(THREE)
    assert max(seen) in (7, 8)
    seen.clear()
    assert failing_queue(tmp_path, seen, fails_at=0).exec(THREE) == [15 * 55] * 3
    assert seen == [7, 8, 9, 10]
    assert list(tmp_path.iterdir()) == []
    seen.clear()
    assert failing_queue(tmp_path, seen, fails_at=0).exec(THREE) == [15 * 55] * 3
    assert len(seen) == 10


def test_another_number_of_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="no luck"):
        failing_queue(tmp_path, [], fails_at=8).exec(THREE)
    with pytest.raises(RemoteError, match="from a run with 3 tasks, but this run has 2: start 3 tasks"):
        failing_queue(tmp_path, [], fails_at=0).exec("threads:2")


def test_a_run_that_has_made_all_steps_already_ends_at_once(tmp_path: Path) -> None:
    seen: list[int] = []
    with pytest.raises(RemoteError, match="no luck"):
        failing_queue(tmp_path, seen, fails_at=8).exec(THREE)
    seen.clear()
    assert failing_queue(tmp_path, seen, fails_at=0).set_max_iter(5).exec(THREE) == [15 * 21] * 3
    assert seen == []


def test_the_state_of_functions_is_restored(tmp_path: Path) -> None:
    class Count(ComputeFunction):
        calls = 0

        def calc(self, context: ComContext) -> None:
            self.calls += 1
            if fails and context.step_no == 3:
                raise ValueError("no luck")
            context.put_obj("calls", self.calls)

    def exec_once() -> list[Any]:
        queue = IterativeComQueue().add(Count()).set_max_iter(4).set_checkpoint(every=1, folder=str(tmp_path))
        return queue.close_with(lambda context: context.get_obj("calls")).exec(THREE)

    fails = True
    with pytest.raises(RemoteError, match="no luck"):
        exec_once()
    fails = False
    assert exec_once() == [4, 4, 4]


def test_threads_need_no_folder() -> None:
    def step(c: IterationStep) -> None:
        c.state.total += c.sum(c.data.sum())

    arguments: dict[str, Any] = {"data": np.arange(6), "state": {"total": 0}, "max_iter": 5, "on": THREE}
    assert iterate(step, **arguments, checkpoint_every=2) == iterate(step, **arguments)


def test_partitioned_data_is_read_only_with_checkpoints(tmp_path: Path) -> None:
    def step(c: IterationStep) -> None:
        c.data[:] = 0

    with pytest.raises(RemoteError, match=r"step failed on task . in step 1: ValueError: .*read-only"):
        iterate(
            step,
            data=np.ones(5000),
            state={},
            max_iter=2,
            on=THREE,
            checkpoint_every=1,
            checkpoint_folder=str(tmp_path),
        )


@pytest.mark.parametrize("has_folder", [True, False])
def test_an_object_that_cannot_be_saved_is_named(tmp_path: Path, has_folder: bool) -> None:
    def step(context: ComContext) -> None:
        context.put_obj("generator", (number for number in range(3)))

    queue = IterativeComQueue().add(step).set_max_iter(2)
    queue.set_checkpoint(every=1, folder=str(tmp_path) if has_folder else None)
    with pytest.raises(
        RemoteError,
        match="the objects 'generator' and the state of the functions cannot be saved in a checkpoint: TypeError",
    ):
        queue.exec(THREE)


def test_mistakes_are_errors() -> None:
    queue = IterativeComQueue().set_max_iter(2)
    with pytest.raises(UsageError, match="every 0 steps is impossible"):
        queue.set_checkpoint(every=0)
    with pytest.raises(UsageError, match="max_restarts=-1 is invalid"):
        queue.set_checkpoint(every=1, max_restarts=-1)


# Other users


def adding(c: IterationStep) -> None:
    c.state.total = c.state.total + c.sum(c.data.sum())
    if c.step_no == 6 and not c.state.is_whole:
        raise ValueError("stop")


def run_in(folder: Path, is_whole: bool) -> float:
    total: float = iterate(
        adding,
        data=np.ones((9, 2)),
        state={"total": 0.0, "is_whole": is_whole},
        max_iter=9,
        on="threads:1",
        checkpoint_every=2,
        checkpoint_folder=str(folder),
    ).state.total
    return total


@pytest.mark.parametrize("place", [".", "task-0"])
def test_a_folder_where_others_may_write_is_refused_before_the_first_step(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "task-0").mkdir(parents=True)
    (folder / place).chmod(0o777)
    steps: list[int] = []
    with pytest.raises(
        RemoteError,
        match=rf"others may write to {(folder / place).resolve()} \(mode 0777\).*chmod -R go-w {folder}",
    ):
        iterate(
            lambda c: steps.append(c.step_no),
            data=np.ones((9, 2)),
            state={},
            max_iter=1,
            on="threads:1",
            checkpoint_every=2,
            checkpoint_folder=str(folder),
        )
    assert steps == []


def test_a_checkpoint_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="ValueError: stop"):
        run_in(tmp_path / "checkpoints", is_whole=False)
    for path in (tmp_path / "checkpoints/task-0").iterdir():
        assert not path.stat().st_mode & 0o077
        path.chmod(0o666)
    with pytest.raises(RemoteError, match=r"others may write to .*step-000000004 \(mode 0666\)"):
        run_in(tmp_path / "checkpoints", is_whole=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("place", [".", "task-0", "task-0/fence-000000.step-000000004"])
def test_a_pickle_of_another_user_does_not_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(RemoteError, match="ValueError: stop"):
        run_in(tmp_path / "checkpoints", is_whole=False)
    trace, stranger = tmp_path / "trace", 65534
    for path in (tmp_path / "checkpoints/task-0").iterdir():
        path.write_bytes(b"cposix\nsystem\n(S'touch %b'\ntR." % bytes(trace))
    os.chown(tmp_path / "checkpoints" / place, stranger, -1)
    with pytest.raises(RemoteError, match=f"belongs to user {stranger}, and this process runs as user 0"):
        run_in(tmp_path / "checkpoints", is_whole=True)
    assert not trace.exists()
    assert not list(tmp_path.rglob("draft-*"))


def test_the_last_step_of_a_folder_that_only_the_tasks_have_is_not_known(tmp_path: Path) -> None:
    """As on a cluster, for a driver that does not share the folder: it says nothing, and creates nothing."""
    place = FolderPlace(str(tmp_path / "checkpoints"))
    assert latest_step(place, 2) is None
    assert not list(tmp_path.iterdir())
    place.open(0).save(3, b"three")
    assert latest_step(place, 2) is None
    place.open(1)
    assert latest_step(place, 2) == 0
    place.open(1).save(3, b"three")
    assert latest_step(place, 2) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="the test maps root")
def test_a_file_server_may_map_the_user_to_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with root_squash does: what root creates belongs to nobody, also in the next run."""
    stat, fstat = os.stat, os.fstat

    def squashed(status: os.stat_result) -> os.stat_result:
        fields = list(status[:10])
        fields[4] = 65534
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", lambda fd: squashed(fstat(fd)))
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: squashed(stat(*args, **kwargs)))
    FolderPlace(str(tmp_path / "checkpoints")).open(0).save(1, b"one")
    again = FolderPlace(str(tmp_path / "checkpoints")).open(0)
    assert (again.latest(), again.load(1)) == (1, b"one")


def test_the_private_group_of_the_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a umask of 002, in folders and files that an earlier version wrote."""
    uid, gid = os.geteuid(), os.getegid()
    user = pwd.struct_passwd(("ann", "x", uid, gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user])
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("ann", "x", gid, [])))
    folder = tmp_path / "checkpoints"
    FolderPlace(str(folder)).open(0).save(1, b"one")
    checkpoint = folder / "task-0/fence-000000.step-000000001"
    for path, mode in [(folder, 0o2775), (folder / "task-0", 0o775), (checkpoint, 0o664)]:
        os.chown(path, -1, gid)
        path.chmod(mode)
    assert FolderPlace(str(folder)).open(0).load(1) == b"one"
    user_obj, bob, group_obj, mask, other = (1, 7, -1), (2, 7, 65534), (4, 5, -1), (16, 7, -1), (32, 5, -1)
    entries = [struct.pack("<HHi", *each) for each in (user_obj, bob, group_obj, mask, other)]
    try:
        os.setxattr(folder, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(entries))
    except OSError as error:
        pytest.skip(f"the file system has no access lists: {error}")
    with pytest.raises(UsageError, match="others may write"):
        FolderPlace(str(folder)).open(0)


@pytest.mark.parametrize(
    ("name", "members", "other_users"),
    [("users", [], 0), ("ann", ["ann", "bob"], 0), ("ann", [], 1), ("", [], 0)],
)
def test_another_group_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], other_users: int
) -> None:
    def group(gid: int) -> grp.struct_group:
        if not name:
            raise KeyError(gid)
        return grp.struct_group((name, "x", gid, members))

    uid, gid = os.geteuid(), os.getegid()
    user, other = (pwd.struct_passwd((each, "x", uid, gid, "", "/", "/bin/sh")) for each in ("ann", "bob"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(pwd, "getpwall", lambda: [user, other][: 1 + other_users])
    monkeypatch.setattr(grp, "getgrgid", group)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    os.chown(folder, -1, gid)
    folder.chmod(0o775)
    with pytest.raises(UsageError, match=rf"others may write .*chmod -R go-w {folder}"):
        FolderPlace(str(folder)).open(0)


def test_the_group_may_not_write_what_a_run_creates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_JOB_ID", "job")  # of `ronde run`, where there are fences
    monkeypatch.setenv("RONDE_ROUND", "0")
    before = os.umask(0o002)
    try:
        FolderPlace(str(tmp_path / "checkpoints")).open(0).save(1, b"one")
    finally:
        os.umask(before)
    assert not [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o022]


def test_a_run_continues_from_its_own_folder_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            with pytest.raises(RemoteError, match="ValueError: stop"):
                run_in(tmp_path / "checkpoints", is_whole=False)
    finally:
        os.umask(before)


def test_a_run_continues_with_a_corrected_finish(tmp_path: Path) -> None:
    def step(c: IterationStep) -> None:
        if c.step_no == 6 and not (tmp_path / "mended").exists():
            raise ValueError("stop")

    def outputs(finish: Any) -> list[Any]:
        folder: dict[str, Any] = dict(checkpoint_every=2, checkpoint_folder=str(tmp_path / "checkpoints"))
        result = iterate(step, data=np.ones(4), state={}, max_iter=9, on="threads:1", finish=finish, **folder)
        return list(result.outputs)

    with pytest.raises(RemoteError, match="ValueError: stop"):
        outputs(lambda c: "wrong")
    (tmp_path / "mended").touch()
    assert outputs(lambda c: "right") == ["right"]
