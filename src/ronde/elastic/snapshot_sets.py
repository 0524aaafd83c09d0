"""Which files of a folder make up a snapshot, which snapshots are complete, and which are no longer wanted. Pure.

A snapshot is one file with the parts that are the same on all ranks, and one for each shard. The name of the first one
contains the number of shards, so that the names alone show which files are missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ronde.checkpoints import CheckpointFile

__all__ = ["SnapshotSet", "shard_name", "snapshot_sets", "unwanted_files", "whole_name"]

_WHOLE = re.compile(r"part-whole(?:-with-(\d+)-shards)?")
_SHARD = re.compile(r"part-shard-(\d+)-of-(\d+)")


def whole_name(num_shards: int) -> str:
    """Return the name of the file with the parts that are the same on all ranks."""
    return f"part-whole-with-{num_shards}-shards" if num_shards else "part-whole"


def shard_name(shard: int, num_shards: int) -> str:
    """Return the name of the file of a shard."""
    return f"part-shard-{shard}-of-{num_shards}"


@dataclass(frozen=True, order=True)
class SnapshotSet:
    """The files of a commit that are there. The order is that of fence and commit. `shards`: by number."""

    fence: int
    commit: int
    num_shards: int
    whole: Path | None = field(default=None, compare=False)
    shards: dict[int, Path] = field(default_factory=dict, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether no file is missing."""
        return self.whole is not None and len(self.shards) == self.num_shards


def snapshot_sets(files: Iterable[CheckpointFile]) -> list[SnapshotSet]:
    """Return the snapshots in a folder, also incomplete ones, the newest last."""
    wholes: dict[tuple[int, int, int], Path] = {}
    shards: defaultdict[tuple[int, int, int], dict[int, Path]] = defaultdict(dict)
    for fence, commit, part, path in files:
        if match := _WHOLE.fullmatch(part):
            wholes[fence, commit, int(match[1] or 0)] = path
        elif (match := _SHARD.fullmatch(part)) and int(match[1]) < int(match[2]):
            shards[fence, commit, int(match[2])][int(match[1])] = path
    return sorted(SnapshotSet(*key, wholes.get(key), shards[key]) for key in {*wholes, *shards})


def unwanted_files(sets: Sequence[SnapshotSet], keep: int) -> list[Path]:
    """Return the files to remove: what is older than the `keep` newest complete snapshots, and what misses files and is
    older than the newest complete one. One that is being written is newer than that.
    """
    complete = [each for each in sets if each.is_complete]
    if not complete:
        return []
    oldest = complete[-keep:][0]
    old = [each for each in sets if each < oldest or (each < complete[-1] and not each.is_complete)]
    return [path for each in old for path in (each.whole, *each.shards.values()) if path is not None]
