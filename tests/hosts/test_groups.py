"""Groups whose ranks are on two hosts: they work, and what they cost."""

from __future__ import annotations

from tests.ranks.communicator import test_splits as programs
from tests.ranks.communicator.test_many_groups import split_often

from ronde.testing.hosts import Hosts

STREAMS = 2


def test_a_split_costs_the_tensors_connections_and_one_file() -> None:
    """Nothing for the ranks of the own host, and no connection besides those for tensors."""
    count, everyone_elsewhere, half_elsewhere = 6, 2, 1
    with Hosts(2, ranks_per_host=2) as two:
        environ = {"RONDE_TCP_STREAMS": str(STREAMS)}
        for before, after in two.run(split_often, count, environ=environ):
            assert after.threads == before.threads
            most = count // 2 * (STREAMS * (everyone_elsewhere + half_elsewhere) + 2)
            assert after.files - before.files <= most


def test_groups_of_ranks_on_two_hosts() -> None:
    with Hosts(2, ranks_per_host=2) as two:
        for program in (
            programs.nested,
            programs.symmetric_memory,
            programs.threads,
            programs.local_shutdown,
        ):
            two.run(program)
