"""Snapshots of real ranks: started again on another world size, killed while writing, and on a full disk."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.ranks.elastic.snapshot_programs import (
    commit_until_killed,
    commit_with_a_full_disk,
    commits_on_disk,
    disagree_on_what_is_there,
    resume,
    secure,
    write_commits,
)

from ronde.errors import RemoteError
from ronde.testing import ranks


def test_a_job_goes_on_from_the_newest_snapshot_on_another_world_size(tmp_path: Path) -> None:
    assert ranks.run(write_commits, 3, tmp_path, 5, False) == [[4, 5]] * 3
    for size in (1, 2):
        found = ranks.run(resume, size, tmp_path, False)
        assert found[0] == (5, (5, 5000.0), None)  # the others get it from rank 0
        assert [commit for commit, _, _ in found] == [5] * size


def test_ranks_that_disagree_on_what_is_written_take_part_alike(tmp_path: Path) -> None:
    assert ranks.run(disagree_on_what_is_there, 2, tmp_path) == [[1, 2]] * 2


def test_the_last_commit_is_written_at_the_end(tmp_path: Path) -> None:
    assert ranks.run(write_commits, 2, tmp_path, 7, True, 3) == [[6, 7]] * 2


def test_commits_that_come_faster_than_the_disk_leave_whole_snapshots(tmp_path: Path) -> None:
    ranks.run(write_commits, 2, tmp_path, 40, True, 1, False)
    assert commits_on_disk(tmp_path)[-1] == 40
    found = ranks.run(resume, 2, tmp_path, True)
    assert found == [(40, (40, 40000.0), [40.0] * 10), (40, (0, 0.0), [41.0] * 10)]


def test_shards_go_back_to_their_ranks(tmp_path: Path) -> None:
    ranks.run(write_commits, 4, tmp_path, 2, True)
    found = ranks.run(resume, 4, tmp_path, True)
    assert [shard for _, _, shard in found] == [[rank + 2.0] * 10 for rank in range(4)]


def test_another_number_of_shards_is_an_error_unless_the_part_can_reshard(tmp_path: Path) -> None:
    ranks.run(write_commits, 4, tmp_path, 2, True)
    with pytest.raises(
        RemoteError,
        match=r"the snapshot of commit 2 in .* has 4 shards, and the job has 2 ranks: start it with 4, or give the part"
        r" 'rows' a method load_shards",
    ):
        ranks.run(resume, 2, tmp_path, True)
    found = ranks.run(resume, 2, tmp_path, True, True)
    assert [shard for _, _, shard in found] == [[2.0] * 10 + [3.0] * 10, [4.0] * 10 + [5.0] * 10]


def test_a_damaged_file_of_one_rank_takes_all_ranks_to_the_snapshot_before(tmp_path: Path) -> None:
    ranks.run(write_commits, 2, tmp_path, 4, True)
    [path] = tmp_path.glob("*.step-000000004.part-shard-1-of-2")
    path.write_bytes(path.read_bytes()[:-1])
    assert [commit for commit, _, _ in ranks.run(resume, 2, tmp_path, True)] == [3, 3]


@pytest.mark.slow
def test_kill_9_while_writing_leaves_the_snapshot_before(tmp_path: Path) -> None:
    for attempt in range(1, 6):
        with pytest.raises(RemoteError, match="SIGKILL"):
            ranks.run(commit_until_killed, 1, tmp_path)
        newest = commits_on_disk(tmp_path)[-1]
        assert newest >= 3 * attempt
        assert ranks.run(resume, 1, tmp_path, False)[0][:2] == (newest, (newest, float(newest << 21)))


@pytest.mark.root
def test_a_full_disk_on_one_rank_leaves_the_snapshot_before(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(tmp_path)], check=True)
    try:
        assert ranks.run(commit_with_a_full_disk, 2, tmp_path) == [([1], 1)] * 2
        assert not list(tmp_path.glob("draft-*"))
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_survivors_write_the_last_commit_when_the_job_ends(tmp_path: Path) -> None:
    """Rank 0, which usually writes, is lost; the next rank has a copy of its shard."""
    texts = ranks.run(secure, 3, tmp_path, 0)
    assert any("Commit 3 is in" in text and "start the job again" in text for text in texts)
    assert commits_on_disk(tmp_path) == [3]
    found = ranks.run(resume, 3, tmp_path, True)
    assert found[0][:2] == (3, (3, 3000.0))
    assert [shard for _, _, shard in found] == [[rank + 3.0] * 10 for rank in range(3)]
