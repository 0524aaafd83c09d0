"""Failures of a job on two nodes: both report the same cause."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.ranks.launcher.test_launcher import HANGING_S, end
from tests.ranks.launcher.test_several_agents import Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.launcher.started:
        process.kill()
        process.communicate()


def leave_raise_and_end_late(rank: int) -> str:
    """A program whose other rank fails within milliseconds, because this one has left it, and ends sooner."""
    return f"""
        import atexit
        import ronde
        ronde.init()
        if rank == {rank}:
            atexit.register(time.sleep, 4)
            try:
                raise ValueError("the cause")
            finally:
                ronde.shutdown()
        ronde.world().barrier()
        """


@pytest.mark.slow
@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_rank_that_raised_is_the_cause_though_it_ends_last(nodes: Nodes, group_rank: int) -> None:
    nodes.launcher.script(leave_raise_and_end_late(group_rank))
    started = [nodes.start(nodes="2"), nodes.start(nodes="2")]
    for process in started:
        code, _, err = end(process)
        report = err[err.rindex(f"ronde: rank {group_rank} (pid ") :]
        assert code == 1
        assert "ValueError: the cause" in report
        assert "PeerLostError" not in report


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_it_is_the_cause_with_a_launcher_of_hosts_too(nodes: Nodes, rank: int) -> None:
    nodes.launcher.script(leave_raise_and_end_late(rank))
    code, _, err = nodes.launcher.run("-n", "2", "-H", "localhost:1,127.0.0.1:1", "script.py")
    report = err[err.rindex(f"ronde: rank {rank} (pid ") :]
    assert code == 1
    assert "raised ValueError: the cause" in report
    assert "PeerLostError" not in report


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_exit_code_is_that_of_the_rank_that_left_though_it_ends_last(nodes: Nodes, rank: int) -> None:
    nodes.launcher.script(f"""
        import atexit, sys, time
        atexit.register(time.sleep, 12)
        import ronde
        ronde.init()
        if rank == {rank}:
            sys.exit(3)
        atexit.unregister(time.sleep)
        ronde.world().barrier()
        """)
    code, _, err = nodes.launcher.run("-n", "2", "-H", "localhost:1,127.0.0.1:1", "script.py")
    assert code == 3, err
    assert "failed with exit code 3" in err[err.rindex(f"ronde: rank {rank} (pid ") :]
    assert "SIGTERM to" not in err


def test_both_nodes_report_a_wrong_key(nodes: Nodes) -> None:
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


def await_line(stream: IO[bytes] | None, text: bytes) -> None:
    """Read on until a line has the text."""
    assert stream is not None
    while text not in (line := stream.readline()):
        assert line, f"nothing like {text!r} came"


@pytest.mark.slow
def test_the_host_of_the_store_is_gone(nodes: Nodes) -> None:
    nodes.launcher.script(
        "import ronde; ronde.init(); print('ready', flush=True); ronde.world().recv(bytearray(1), 0)"
    )
    host = nodes.start(nodes="2", conf="keep_alive_interval=3")
    await_line(host.stderr, b"1 of 2 nodes is here; waiting for the others")  # it serves the store
    other = nodes.start(nodes="2", conf="keep_alive_interval=3")
    await_line(other.stdout, b"ready")
    host.kill()
    await_line(other.stderr, b"was lost, and the store with it; starting again without")
    await_line(other.stderr, b"1 of 2 nodes is here; waiting for the others")
    other.terminate()
    assert end(other)[0] == 128 + signal.SIGTERM


def test_a_node_without_the_script(nodes: Nodes, tmp_path: Path) -> None:
    process = nodes.launcher.start(
        "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{nodes.port}", "elsewhere/train.py"
    )
    code, _, err = end(process)
    assert code == 2
    assert "script 'elsewhere/train.py' not found in " in err
