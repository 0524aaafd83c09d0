"""What another communicator or process set costs its process: many of them at once, under a low limit of files."""

from __future__ import annotations

import os
import resource
from typing import Any, NamedTuple

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

LIMIT = 1024
MANY = 300


class Cost(NamedTuple):
    """What a process has of the kinds of things of which it may have a limited number."""

    files: int
    threads: int

    @classmethod
    def now(cls) -> Cost:
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


def split_often(count: int) -> tuple[Cost, Cost]:
    """Return what this process has before and after the splits; all of the new communicators work, and are closed."""
    limit_files()
    ronde.init()
    world: Any = ronde.world()
    before = Cost.now()
    groups = [world.split(number % 2 * (world.rank % 2), key=number) for number in range(count)]
    after = Cost.now()
    for group in groups:
        assert group.allreduce(np.ones(3))[0] == group.size
    for group in groups[1:]:
        group.shutdown()
    world.barrier()
    # Closing the others has done nothing to this one.
    assert groups[0].allreduce(np.ones(3))[0] == groups[0].size
    again = world.split(0)
    assert again.allgather(np.array([world.rank])).tolist() == list(range(world.size))
    ronde.shutdown()
    return before, after


@pytest.mark.parametrize(
    ("size", "count"), [(2, 4), (4, 4), pytest.param(4, MANY, marks=pytest.mark.slow, id="many")]
)
def test_a_split_costs_no_files_and_no_threads_on_a_host(size: int, count: int) -> None:
    for before, after in ranks.run(split_often, size, count):
        assert after == before


def test_a_split_costs_the_tensors_connections_and_one_file_between_hosts() -> None:
    streams, size, count = 2, 4, 6
    environ = {"RONDE_TRANSPORT": "tcp", "RONDE_TCP_STREAMS": str(streams)}
    for before, after in ranks.run(split_often, size, count, environ=environ):
        of_everyone, of_half = (streams * others + 1 for others in (size - 1, size // 2 - 1))
        assert after.threads == before.threads
        assert after.files - before.files <= count // 2 * (of_everyone + of_half)


def add_sets(count: int) -> list[Cost]:
    """Return what this process has, with so many process sets more each time; all of them work."""
    limit_files()
    ronde.init()
    costs = [Cost.now()]
    sets = []
    for number in range(count):
        members = [rank for rank in range(ronde.size()) if number + 1 >> rank & 1]
        sets.append(ronde.add_process_set(members))
        if members and ronde.rank() in members:
            total = ronde.allreduce(np.ones(2), op=ronde.Sum, name="x", process_set=sets[-1])
            assert total[0] == len(members)
            costs.append(Cost.now())
    ronde.shutdown()
    return costs


def test_a_process_set_costs_a_thread_and_no_files() -> None:
    for costs in ranks.run(add_sets, 3, 6):  # all but that of all ranks, which there is
        assert len({cost.files for cost in costs}) == 1
        assert costs[-1].threads - costs[0].threads <= len(costs) - 1


def add_many_sets(count: int) -> Cost:
    """The same ranks again and again in sets of two and more, of as many ranks as are needed for different ones."""
    limit_files()
    ronde.init()
    for number in range(count):
        ronde.add_process_set([rank for rank in range(ronde.size()) if number + 1 >> rank & 1])
    cost = Cost.now()
    ronde.shutdown()
    return cost


@pytest.mark.slow
def test_three_hundred_process_sets() -> None:
    """Nine ranks have 511 sets of them; each is in half of 300."""
    for cost in ranks.run(add_many_sets, 9, MANY):
        assert cost.files < 100


def reduce_for_ever(group: Any) -> None:
    while True:
        group.allreduce(np.ones(3))


def die_in_many_groups(count: int) -> list[str]:
    """One rank ends without a word: on the others every communicator that it was in has failed, and no other."""
    ronde.init()
    world: Any = ronde.world()
    with_it = [world.split(0, key=number) for number in range(count)]
    without_it = world.group([0, 1])
    if world.rank == 2:
        for source in (0, 1):  # it must not die while they still make `without_it`
            world.recv(np.empty(1), source)
        os._exit(9)
    world.send(np.ones(1), 2)
    messages = []
    for group in with_it:
        with pytest.raises(ronde.PeerLostError) as caught:
            reduce_for_ever(group)
        messages.append(str(caught.value))
    for _ in range(100):
        assert without_it.allreduce(np.ones(3))[0] == 2
    return messages


def test_a_dead_rank_ends_the_calls_of_all_its_communicators() -> None:
    with ranks.start(die_in_many_groups, 3, 20) as job:
        first, second, third = job.outcomes()
    assert third.error is not None
    for outcome in (first, second):
        assert outcome.error is None, outcome.traceback_text
        assert all("was lost: its process ended without shutting down" in each for each in outcome.value)
