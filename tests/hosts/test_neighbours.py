"""Copies of shards on another host: the loss of a whole host loses no shard."""

from __future__ import annotations

from tests.ranks.elastic.neighbour_programs import survive
from tests.ranks.elastic.test_neighbours import committed

from ronde.testing.hosts import Hosts


def test_a_lost_host_loses_no_shard() -> None:
    """Ranks 0 to 3 work on two hosts, the ranks of the second are killed, and those of the third take over."""
    new_world = (0, 1, 5, 4)
    with (
        Hosts(3, ranks_per_host=2) as three,
        three.start(survive, 4, (2, 3), new_world, "before the commit", False) as job,
    ):
        found = [outcome.value for outcome in job.outcomes()]
    for rank, started in enumerate(new_world):
        assert found[started] == (committed(rank), [(rank + 2) % 4])
