"""The cause of a failure is named on all nodes, whichever worker ends first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks.test_launcher import end
from tests.ranks.test_several_agents import Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.launcher.started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_rank_that_raised_is_the_cause_though_it_ends_last(nodes: Nodes, group_rank: int) -> None:
    """It leaves the others at once, so they fail within milliseconds, and its own process takes seconds to end."""
    nodes.launcher.script(
        f"""
        import atexit
        import ronde
        ronde.init()
        if rank == {group_rank}:
            atexit.register(time.sleep, 4)
            try:
                raise ValueError("the cause")
            finally:
                ronde.shutdown()
        ronde.world().barrier()
        """
    )
    started = [nodes.start(nodes="2"), nodes.start(nodes="2")]
    for process in started:
        code, _, err = end(process)
        report = err[err.rindex(f"ronde: rank {group_rank} (pid ") :]
        assert code == 1
        assert "ValueError: the cause" in report
        assert "PeerLostError" not in report
