"""Which snapshots of a folder are complete, and which files are removed."""

from __future__ import annotations

import random
from pathlib import Path

from ronde.checkpoints import CheckpointFile, checkpoint_files
from ronde.elastic.snapshot_sets import shard_name, snapshot_sets, unwanted_files, whole_name


def of(*names: str) -> list[CheckpointFile]:
    return checkpoint_files(Path("folder"), names)


def snapshot(fence: int, commit: int, num_shards: int, without: int | None = None) -> list[str]:
    parts = [whole_name(num_shards), *(shard_name(each, num_shards) for each in range(num_shards))]
    return [f"fence-{fence:06}.step-{commit:09}.{part}" for n, part in enumerate(parts) if n != without]


def test_a_snapshot_is_complete_when_all_its_files_are_there() -> None:
    names = [*snapshot(1, 10, 0), *snapshot(1, 20, 3, without=2), *snapshot(1, 30, 2)]
    sets = snapshot_sets(of(*names, "fence-000001", "fence-000001.step-000000040", "draft-1.part-whole"))
    assert [(each.commit, each.is_complete) for each in sets] == [(10, True), (20, False), (30, True)]
    assert not any(each.is_complete for each in snapshot_sets(of(*snapshot(1, 10, 2, without=0))))


def test_files_of_another_number_of_shards_do_not_complete_a_snapshot() -> None:
    names = [*snapshot(1, 10, 2, without=1), *snapshot(1, 10, 3, without=0)]
    assert not any(each.is_complete for each in snapshot_sets(of(*names)))


def test_a_later_round_is_newer() -> None:
    sets = snapshot_sets(of(*snapshot(1, 900, 0), *snapshot(2, 800, 0)))
    assert [each.commit for each in sets] == [900, 800]


def test_the_newest_complete_snapshots_stay() -> None:
    names = [
        *snapshot(1, 10, 2),
        *snapshot(1, 20, 2, without=0),
        *snapshot(1, 30, 2),
        *snapshot(1, 40, 2),
        *snapshot(1, 50, 2, without=1),
    ]
    gone = {path.name for path in unwanted_files(snapshot_sets(of(*names)), keep=2)}
    assert gone == {*snapshot(1, 10, 2), *snapshot(1, 20, 2, without=0)}


def test_in_any_order_of_writing_and_dying_a_complete_snapshot_stays() -> None:
    """Ranks write their files in any order, and may fail; each removes old files after it has written its own."""
    for seed in range(20):
        chance = random.Random(seed)
        keep, there, has_complete = chance.randint(1, 3), set[str](), False
        for commit in range(1, 30):
            names = snapshot(1, commit, 3)
            chance.shuffle(names)
            for name in names:
                if chance.random() < 0.1:
                    continue  # a full disk
                there.add(name)
                before = [each for each in snapshot_sets(of(*there)) if each.is_complete]
                there -= {path.name for path in unwanted_files(snapshot_sets(of(*there)), keep)}
                after = [each for each in snapshot_sets(of(*there)) if each.is_complete]
                has_complete |= bool(after)
                assert after == before[-keep:], seed
        assert has_complete
