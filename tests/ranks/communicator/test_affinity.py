"""`thread_affinity`: the threads of Ronde itself run where the setting says, and the program's where they were."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest

import ronde
from ronde.net.host import host_name
from ronde.testing import ranks

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [pytest.mark.skipif(len(CORES) < 2, reason="needs two cores"), pytest.mark.alone]


def affinities() -> dict[int, set[int]]:
    """The cores of every thread of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended meanwhile
        (text,) = re.findall(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
        cores = set()
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
        found[int(task.name)] = cores
    return found


def pinned(cores: list[int]) -> None:
    before = affinities()
    ronde.init(thread_affinity=cores)
    rank, size = ronde.rank(), ronde.size()
    half = ronde.world().split(rank % 2, rank)  # in which this rank has another local number
    assert half is not None
    assert ronde.allreduce(np.ones(3), name="x", op=ronde.Sum).tolist() == [size] * 3
    after = affinities()
    new = [after[thread] for thread in after if thread not in before]
    assert len(new) >= (2 if size > 1 else 1)  # the engine's, and that of all control connections
    assert new == [{cores[ronde.local_rank()]}] * len(new)
    assert {thread: after[thread] for thread in before} == before
    ronde.barrier()  # a rank that shuts down ends the engines of those that are still counting, too
    half.shutdown()
    ronde.shutdown()


@pytest.mark.parametrize("n", [1, 3])
def test_threads_are_where_the_setting_says(n: int) -> None:
    ranks.run(pinned, n, [CORES[-1], CORES[0], CORES[-1]])


def refused(cores: list[int], message: str) -> None:
    before = affinities()
    with pytest.raises(
        (ronde.UsageError, ronde.PeerLostError), match=message
    ):  # or another rank says it first
        ronde.init(thread_affinity=cores)
    assert affinities() == before
    assert not ronde.is_initialized()


def test_mistakes_are_named() -> None:
    missing = 4000 + max(CORES)
    ranks.run(refused, 2, [CORES[0], missing], rf"local rank 1 cannot use core {missing} of host ")


def ignored(cores: list[int]) -> None:
    """As scripts for horovodrun set it, which accepts one number: the host logs one warning, and the job continues."""
    before = affinities()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ronde.init(thread_affinity=cores)
        half = ronde.world().split(0, ronde.rank())
    assert half is not None
    new = [found for thread, found in affinities().items() if thread not in before]
    assert new == [set(CORES)] * len(new)
    message = (
        f"thread_affinity={cores[0]} has no effect on host {host_name()}, which has 2 ranks: expected 2 cores"
    )
    assert said.getvalue().count(message) == (1 if ronde.local_rank() == 0 else 0)
    half.shutdown()
    ronde.shutdown()


def test_fewer_cores_than_ranks_have_no_effect() -> None:
    ranks.run(ignored, 2, [CORES[0]])


def bound(choose: str) -> None:
    """Each rank runs where it is told to before it joins, as its launcher would have it."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(
        0, {"each its own": {CORES[rank]}, "all on one": {CORES[0]}, "anywhere": CORES}[choose]
    )
    ronde.init()
    world = ronde.world()
    assert world.native.is_crowded() is (choose == "all on one")
    assert ronde.allreduce(np.ones(3), name="x", op=ronde.Sum).tolist() == [2] * 3
    part = world.split(0, rank)
    assert part is not None
    assert part.native.is_crowded() is (choose == "all on one")
    part.shutdown()
    ronde.shutdown()


@pytest.mark.parametrize("choose", ["each its own", "all on one", "anywhere"])
def test_ranks_with_a_core_each_are_not_crowded(choose: str) -> None:
    """Who has to share spins less; ranks that are bound to a core of their own have what they need."""
    ranks.run(bound, 2, choose)
