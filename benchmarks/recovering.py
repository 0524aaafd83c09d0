"""The workers of recovery.py: they call all-reduce in a loop, in place of training, and record when.

    recovering.py KIND FOLDER [--elements N] [--step SECONDS] [--commit-every N]

KIND says how the worker communicates and what it does after a loss:

    in-place     ronde.elastic: goes on in the same process
    restart      Ronde, and starts from its checkpoint when the launcher starts it again
    gloo         the same with torch.distributed and Gloo
    reconfigure  torch.distributed and Gloo, and goes on by torch's `_reconfigure` (PyTorch 2.14); started without a
                 launcher, as RANK of WORLD_SIZE with a TCPStore at MASTER_PORT

With --elements the worker has parameters (float32) and a loader with two processes: a step takes a batch from the
loader and changes a few parameters. Every worker appends to FOLDER/PID one line for each world in which it has done an
all-reduce: rank, size, and on the clock that all processes share the times when its imports were complete and when that
all-reduce was done. Workers end when FOLDER/stop exists; then rank 0 of `in-place` writes into FOLDER/steps how many
steps counted, the time, and the median duration of the steps that it has done, in nanoseconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES = 32, 1024
LIMIT = timedelta(seconds=60)
LOOK_S = 0.0005
CHANGED = 1024  # parameters that a step changes: the benchmark is about recovery, and not about arithmetic


class Samples(Dataset[torch.Tensor]):  # type: ignore[misc]
    """Samples that are computed when they are read."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), float(index % 7))


class Report:
    """What this process has done, in its file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._imported_ns = time.monotonic_ns()
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._world: object = None

    def done(self, world: object, rank: int, size: int) -> None:
        """An all-reduce is done in this world; only the first of each is recorded."""
        if world != self._world:
            self._world = world
            os.write(self._file, f"{rank} {size} {self._imported_ns} {time.monotonic_ns()}\n".encode())

    def stopped(self) -> float:
        """Return 1.0 if the job is to end, else 0.0."""
        return float((self.folder / "stop").exists())


class Work:
    """One step of training, without its all-reduce."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.parameters = np.zeros(arguments.elements, np.float32)
        self.step = 0
        self._seconds = arguments.step
        self._loader = _loader() if arguments.elements else None

    def compute(self) -> None:
        """Take a batch, change parameters, and wait for the rest of the step."""
        if self._loader is not None:
            batch = next(self._loader)
            start = self.step * CHANGED % (len(self.parameters) - CHANGED)
            self.parameters[start : start + CHANGED] += batch.sum(0).numpy()
        time.sleep(self._seconds)


def _loader() -> Iterator[torch.Tensor]:
    return iter(DataLoader(Samples(), batch_size=BATCH, num_workers=2))


def in_place(arguments: argparse.Namespace, report: Report) -> None:
    """Go on in this process after a loss."""
    import ronde

    work = Work(arguments)
    worlds = itertools.count()
    durations: list[int] = []

    def train(state: Any) -> None:
        world, number = ronde.world(), next(worlds)
        work.parameters, work.step = state.parameters, state.step
        while True:
            total = world.allreduce(np.array([1.0, report.stopped()]))
            report.done(number, world.rank, world.size)
            if total[1] == world.size:
                break
            began_ns = time.monotonic_ns()
            work.compute()
            state.step = work.step = work.step + 1
            if state.step % arguments.commit_every == 0:
                state.commit()
            durations.append(time.monotonic_ns() - began_ns)
        if world.rank == 0:
            facts = (state.step, time.monotonic_ns(), round(statistics.median(durations or [0])))
            (report.folder / "steps").write_text(" ".join(map(str, facts)))

    state = ronde.elastic.ObjectState(parameters=work.parameters, step=0)
    ronde.elastic.run(train)(state)


class Checkpoint:
    """The newest parameters in a file, as scripts write them that are started again."""

    def __init__(self, folder: pathlib.Path, work: Work, every: int) -> None:
        self._path = folder / "checkpoint.npz"
        self._work = work
        self._every = every
        if self._path.exists():
            with np.load(self._path) as found:
                work.parameters, work.step = found["parameters"], int(found["step"])

    def save(self, rank: int) -> None:
        """Save every n-th step, by rank 0."""
        self._work.step += 1
        if rank == 0 and self._work.step % self._every == 0:
            part = self._path.with_name("part.npz")
            np.savez(part, parameters=self._work.parameters, step=self._work.step)
            part.rename(self._path)


def restart(arguments: argparse.Namespace, report: Report) -> None:
    """Train with Ronde, from the checkpoint."""
    import ronde

    ronde.init()
    world, work = ronde.world(), Work(arguments)
    checkpoint = Checkpoint(report.folder, work, arguments.commit_every)
    while True:
        total = world.allreduce(np.array([1.0, report.stopped()]))
        report.done(0, world.rank, world.size)
        if total[1] == world.size:
            break
        work.compute()
        checkpoint.save(world.rank)
    ronde.shutdown()


def gloo(arguments: argparse.Namespace, report: Report) -> None:
    """Train with Gloo, from the checkpoint."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    work = Work(arguments)
    checkpoint = Checkpoint(report.folder, work, arguments.commit_every)
    while True:
        total = torch.tensor([1.0, report.stopped()])
        torch.distributed.all_reduce(total)
        report.done(0, rank, size)
        if total[1] == size:
            break
        work.compute()
        checkpoint.save(rank)
    torch.distributed.destroy_process_group()


def reconfigure(arguments: argparse.Namespace, report: Report) -> None:
    """Go on by torch's reconfigure after the loss of the last rank. The parameters are not rolled back."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=LIMIT)
    group_store = dist.PrefixStore("group/", store)
    dist.init_process_group(
        "gloo", store=group_store, rank=rank, world_size=size, timeout=LIMIT, enable_reconfigure=True
    )
    lost = _reconfigure(store, rank, size)
    work = Work(arguments)
    while True:
        total = torch.tensor([1.0, report.stopped()])
        if not _all_reduce(total, lost):  # the last rank has died, as this program knows without a vote
            size -= 1
            lost = _reconfigure(store, rank, size)
            continue
        report.done(size, rank, size)
        if total[1] == size:
            break
        work.compute()
    os._exit(0)  # the group's destructors wait for the dead rank


def _all_reduce(total: torch.Tensor, lost: threading.Event) -> bool:
    """Return whether it is done. Gloo raises only on ranks that wait for the dead one; the store tells the others."""
    try:
        handle = torch.distributed.all_reduce(total, async_op=True)
        while not handle.is_completed():
            if lost.wait(LOOK_S):
                return False
        handle.wait()
    except RuntimeError:
        return False
    return True


def _reconfigure(store: Any, rank: int, size: int) -> threading.Event:
    """Form a group of this size. Return what tells of its loss."""
    store.set(f"lost/{size}", b"")
    store.set(f"{size}/{rank}", torch.distributed._get_reconfigure_handle())
    handles = [store.get(f"{size}/{each}").decode() for each in range(size)]
    torch.distributed._reconfigure(size, handles).wait()
    lost = threading.Event()
    threading.Thread(target=_await_loss, args=(store.clone(), size - 1, lost), daemon=True).start()
    return lost


def _await_loss(store: Any, size: int, lost: threading.Event) -> None:
    store.get(f"lost/{size}")
    lost.set()


KINDS = {"in-place": in_place, "restart": restart, "gloo": gloo, "reconfigure": reconfigure}


def main() -> None:
    """Train until the job is to end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--elements", type=int, default=0)
    parser.add_argument("--step", type=float, default=0.01)
    parser.add_argument("--commit-every", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    KINDS[arguments.kind](arguments, Report(arguments.folder))


if __name__ == "__main__":
    main()
