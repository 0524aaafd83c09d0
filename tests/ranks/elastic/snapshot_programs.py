"""What ranks do in the tests of snapshots, neighbours and checks: a few commits of a state of arrays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.elastic.parts import Arrays, Shard

import ronde
from ronde.checkpoints import checkpoint_files
from ronde.elastic.snapshot_sets import snapshot_sets
from ronde.elastic.snapshots import Snapshots

__all__ = [
    "commit_until_killed",
    "commit_with_a_full_disk",
    "commits_on_disk",
    "disagree_on_what_is_there",
    "resume",
    "secure",
    "write_commits",
]


class HalvedShard(Shard):
    """A shard that can be made of two or more others. Without a number of shares, the ranks share the values."""

    share, num_shares = 0, 0

    def load_shards(self, payloads: list[Any]) -> None:
        everything = np.concatenate([each["values"] for each in payloads])
        shares = np.array_split(everything, self.num_shares or ronde.size())
        self.load({"values": shares[self.share if self.num_shares else ronde.rank()]})


def _parts(has_shard: bool, kind: type[Shard] = Shard) -> dict[str, Arrays]:
    parts = {"model": Arrays(weights=np.zeros(1000), step=0)}
    if has_shard:
        parts["rows"] = kind(values=np.full(10, float(ronde.rank())))
    return parts


def _commit(snapshots: Snapshots, number: int, parts: dict[str, Arrays]) -> None:
    for part in parts.values():
        part.live[next(iter(part.live))] += 1
    parts["model"].live["step"] = number
    snapshots.before_save()
    for part in parts.values():
        part.save()
    snapshots.after_save(number, parts, ronde.world())


def disagree_on_what_is_there(folder: Path) -> list[int]:
    """Commit twice, where rank 0 takes its shard of the second commit for written. Return what is on disk then."""
    ronde.init()
    snapshots, parts = Snapshots(folder), _parts(has_shard=True)
    _commit(snapshots, 1, parts)
    snapshots.flush()
    if ronde.rank() == 0:
        snapshots._on_disk = 2
    _commit(snapshots, 2, parts)
    snapshots.flush()
    ronde.world().barrier()
    return commits_on_disk(folder)


def commits_on_disk(folder: Path) -> list[int]:
    """Return the numbers of the commits whose snapshots are complete."""
    return [each.commit for each in snapshot_sets(checkpoint_files(folder)) if each.is_complete]


def write_commits(folder: Path, last: int, has_shard: bool, every: int = 1, waits: bool = True) -> list[int]:
    ronde.init()
    snapshots, parts = Snapshots(folder, every), _parts(has_shard)
    for number in range(1, last + 1):
        _commit(snapshots, number, parts)
        if waits:
            snapshots.flush()
            ronde.world().barrier()
    snapshots.finish(last, parts)
    ronde.world().barrier()
    return commits_on_disk(folder)


def resume(folder: Path, has_shard: bool, can_reshard: bool = False) -> tuple[int | None, Any, Any]:
    ronde.init()
    parts = _parts(has_shard, HalvedShard if can_reshard else Shard)
    commit = Snapshots(folder).restore(parts, ronde.world())
    shard = parts["rows"].live["values"].tolist() if has_shard else None
    model = parts["model"].live
    return commit, (model["step"], model["weights"].sum()), shard


def commit_until_killed(folder: Path) -> None:
    """Kill this process in the middle of writing, at a time that differs from call to call."""
    ronde.init()
    snapshots = Snapshots(folder)
    parts: dict[str, Arrays] = {"model": Arrays(weights=np.zeros(1 << 21), step=0)}
    last = snapshots.restore(parts, ronde.world()) or 0
    for number in range(last + 1, last + 4):
        _commit(snapshots, number, parts)
        snapshots.flush()
    _commit(snapshots, last + 4, parts)
    while not list(folder.glob("draft-*")):
        time.sleep(0.0002)
    time.sleep(int.from_bytes(os.urandom(1), "little") / 256 * 0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def commit_with_a_full_disk(folder: Path) -> tuple[list[int], int | None]:
    ronde.init()
    world = ronde.world()
    snapshots, parts = Snapshots(folder, keep=1), _parts(has_shard=True)
    _commit(snapshots, 1, parts)
    snapshots.flush()
    world.barrier()
    for number in (2, 3):
        if world.rank == 0:
            parts["model"].live["padding"] = np.zeros(1 << 18)
        _commit(snapshots, number, parts)
        snapshots.flush()
        world.barrier()
    found = commits_on_disk(folder)
    parts = _parts(has_shard=True)
    return found, Snapshots(folder).restore(parts, world)


def secure(folder: Path, lost: int) -> str:
    """Commit in memory alone; then all but one rank wait for workers in vain."""
    ronde.init()
    world = ronde.world()
    snapshots, parts = Snapshots(folder, every=100), _parts(has_shard=True)
    for number in (1, 2, 3):
        _commit(snapshots, number, parts)
    everyone = world.allgather(parts["rows"].copy["values"][None])
    if world.rank == lost:
        return ""
    known = {world.rank: {"rows": {"values": everyone[world.rank]}}}
    if world.rank == (lost + 1) % world.size:
        known[lost] = {"rows": {"values": everyone[lost]}}
    try:
        with snapshots.securing(3, parts, lambda: known):
            raise ronde.PeerLostError("too few workers are left")
    except ronde.PeerLostError as error:
        return " ".join([str(error), *error.__notes__])
