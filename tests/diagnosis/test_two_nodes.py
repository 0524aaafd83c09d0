"""Failures of a job on two nodes: both say the same cause."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks.test_launcher import HANGING_S, end
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


def test_a_wrong_key_is_said_on_both_nodes(nodes: Nodes) -> None:
    nodes.launcher.script("")
    keys = [{**os.environ, "RONDE_JOB_KEY": digit * 64} for digit in "12"]
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "--rdzv-conf")
    first = nodes.launcher.start(*words, "is_host=true", "script.py", env=keys[0])
    assert first.stderr is not None
    assert b"1 of 2 nodes is here" in first.stderr.readline()
    second = nodes.launcher.start(*words, "is_host=false", "script.py", env=keys[1])
    code, _, err = end(second)
    assert code == 2
    assert "the other end does not know the job key (RONDE_JOB_KEY) of this job" in err
    assert "give all nodes the same RONDE_JOB_KEY" in err
    line = first.stderr.readline().decode()
    assert re.search(
        r"turned away a connection from 127\.0\.0\.1:\d+: the other end does not know the job key", line
    )
    assert first.poll() is None
    first.terminate()
    first.wait(HANGING_S)
