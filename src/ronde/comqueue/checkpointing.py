"""Checkpoints of the tasks of a queue: what they contain, and where they are stored.

Every few steps, after a barrier, each task saves the objects that it has made and the state of its functions. So the
newest checkpoints of two tasks are at most one apart. Each task keeps its last two, so tasks that start again find a
step that all of them have saved. The partitioned data are not saved but loaded again, so they are read-only.

Checkpoints must outlive the tasks. If a cluster loses one task, the others end, too, so no task can keep checkpoints
for another one: the driver does.

A checkpoint can contain a pickle, which can run any program. So tasks use a folder only if no other user decides what
is in it, and look before the first step, not when a run has to continue. The store of a job, and memory of this
machine, are for processes of the job alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ronde.checkpoints import Checkpoints, require_own
from ronde.errors import UsageError
from ronde.launch.driver.job_store import connect_to_driver
from ronde.stores.store import Store, delete_large, get_large, put_large
from ronde.trusted_files import create_anew

__all__ = [
    "CheckpointPlace",
    "CheckpointRule",
    "DriverMemory",
    "DriverPlace",
    "FolderPlace",
    "MemoryPlace",
    "StoreCheckpoints",
    "TaskCheckpoints",
    "latest_step",
]

_NUMBER_BYTES = 8
_STORE_NS = 60 * 10**9  # for an answer of the driver


@dataclass(frozen=True)
class CheckpointRule:
    """When tasks save checkpoints, and how often they start again.

    `every`: after how many steps; `folder`: where, None: in the driver's memory; `max_restarts`: of one run.
    """

    every: int
    folder: str | None
    max_restarts: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(
                f"a checkpoint every {self.every} steps is impossible: expected a number above 0"
            )
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts} is invalid: expected 0 or more")


class TaskCheckpoints(Protocol):
    """The last two checkpoints of one task."""

    def latest(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is none."""

    def load(self, step: int) -> bytes:
        """Return the checkpoint of that step, which is one of the last two."""

    def save(self, step: int, data: bytes) -> None:
        """Save a checkpoint. If this process dies during the call, the last complete one remains."""

    def clear(self) -> None:
        """Remove all checkpoints."""


class CheckpointPlace(Protocol):
    """Where tasks save checkpoints; it can be pickled."""

    def open(self, task_id: int) -> TaskCheckpoints:
        """Return the checkpoints of a task."""


class FolderPlace:
    """A folder that all tasks share. Its checkpoints outlive this process.

    `open` raises UsageError for a folder that another user owns or may write.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)

    def open(self, task_id: int) -> TaskCheckpoints:
        folder = Path(self._folder) / f"task-{task_id}"
        for each in (folder.parent, folder):
            each.mkdir(0o755, parents=True, exist_ok=True)
            require_own(each.stat(), each, folder.parent, "checkpoint_folder")
        return _FolderCheckpoints(folder)

    def is_there(self, num_tasks: int) -> bool:
        """Return whether this machine has the folders of all tasks. On a cluster, the tasks may have another one."""
        return all(os.path.isdir(os.path.join(self._folder, f"task-{task}")) for task in range(num_tasks))


class _FolderCheckpoints:
    def __init__(self, folder: Path) -> None:
        self._checkpoints = Checkpoints(folder, keep=2)

    def latest(self) -> int:
        path = self._checkpoints.latest()
        return self._checkpoints.step_of(path) if path else 0

    def load(self, step: int) -> bytes:
        path = self._checkpoints.at(step)
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            require_own(os.fstat(file.fileno()), path, path.parent.parent, "checkpoint_folder")
            return file.read()

    def save(self, step: int, data: bytes) -> None:
        with self._checkpoints.writing(step) as path, open(create_anew(path, mode=0o600), "wb") as file:
            file.write(data)

    def clear(self) -> None:
        shutil.rmtree(self._checkpoints.folder, ignore_errors=True)


class MemoryPlace:
    """Memory of this machine, until the stack of the process that made it closes."""

    def __init__(self, num_tasks: int, stack: ExitStack) -> None:
        fds = [os.memfd_create("ronde-checkpoint", os.MFD_CLOEXEC) for _ in range(2 * num_tasks)]
        for fd in fds:
            stack.callback(os.close, fd)
        self._paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]

    def open(self, task_id: int) -> TaskCheckpoints:
        return _MemoryCheckpoints(self._paths[2 * task_id : 2 * task_id + 2])


class _MemoryCheckpoints:
    """Two alternating files. Each begins with the number of its step, which is written last: 0 means incomplete."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def latest(self) -> int:
        return max(map(_step_of, self._paths))

    def load(self, step: int) -> bytes:
        path = next(path for path in self._paths if _step_of(path) == step)
        with open(path, "rb") as file:
            file.seek(_NUMBER_BYTES)
            return file.read()

    def save(self, step: int, data: bytes) -> None:
        with open(min(self._paths, key=_step_of), "r+b") as file:
            file.truncate(0)
            file.seek(_NUMBER_BYTES)
            file.write(data)
            file.flush()
            file.seek(0)
            file.write(step.to_bytes(_NUMBER_BYTES, "little"))

    def clear(self) -> None:
        for path in self._paths:
            os.truncate(path, 0)


def _step_of(path: str) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(file.read(_NUMBER_BYTES), "little")


def latest_step(place: CheckpointPlace | None, num_tasks: int) -> int | None:
    """Return the newest step of which all tasks have a checkpoint; 0 if there is none, None if that is not known.

    It creates no folder: where the tasks have one, this process may have none.
    """
    if place is None or (isinstance(place, FolderPlace) and not place.is_there(num_tasks)):
        return None
    try:
        return min(place.open(task).latest() for task in range(num_tasks))
    except (OSError, UsageError):  # a folder that only the tasks can use
        return None


class StoreCheckpoints:
    """The last two checkpoints of one task in the store of a job: two values, and the step of each under another key.

    The step is written after its checkpoint, and deleted before it is replaced.
    """

    def __init__(self, store: Store, task_id: int) -> None:
        self._store = store
        self._keys = [f"checkpoints/{task_id}/{number}" for number in range(2)]

    def latest(self) -> int:
        return max(map(self._step_of, self._keys))

    def load(self, step: int) -> bytes:
        key = next(key for key in self._keys if self._step_of(key) == step)
        return b"".join(get_large(self._store, key, _STORE_NS))

    def save(self, step: int, data: bytes) -> None:
        key = min(self._keys, key=self._step_of)
        self._delete(key)
        put_large(self._store, key, data)
        self._store.set(_step_key(key), str(step).encode())

    def clear(self) -> None:
        for key in self._keys:
            self._delete(key)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, the newest last."""
        return sorted(filter(None, map(self._step_of, self._keys)))

    def _step_of(self, key: str) -> int:
        return int(self._store.get(_step_key(key), _STORE_NS)) if self._store.check([_step_key(key)]) else 0

    def _delete(self, key: str) -> None:
        self._store.delete_key(_step_key(key))
        delete_large(self._store, key)


def _step_key(key: str) -> str:
    return f"{key}.step"


class DriverPlace:
    """Memory of the driver of a cluster's job: the job's store, with which a `DriverMemory` begins and ends."""

    def open(self, task_id: int) -> TaskCheckpoints:
        return StoreCheckpoints(connect_to_driver(_STORE_NS), task_id)


class DriverMemory:
    """The checkpoints of all tasks, from one job on a cluster to the next. See `JobMemory`."""

    def __init__(self, num_tasks: int) -> None:
        self._saved: list[dict[int, bytes]] = [{} for _ in range(num_tasks)]  # by task and step

    def offer_to(self, store: Store) -> None:
        for task_id, saved in enumerate(self._saved):
            for step, data in sorted(saved.items()):
                StoreCheckpoints(store, task_id).save(step, data)

    def latest(self) -> int:
        """Return the newest step of which all tasks have a checkpoint; 0 if there is none."""
        return min(max(saved, default=0) for saved in self._saved)

    def collect_from(self, store: Store) -> None:
        for task_id in range(len(self._saved)):
            checkpoints = StoreCheckpoints(store, task_id)
            self._saved[task_id] = {step: checkpoints.load(step) for step in checkpoints.steps()}
