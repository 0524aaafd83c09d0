"""A job survives the death of one member of an etcd, all of whose members `--rdzv-endpoint` names."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.conformance.etcd_cluster import EtcdCluster
from tests.ranks.launcher.test_launcher import Launcher, end

SCRIPT = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("here", rank, os.getpid(), "attempt", attempt, flush=True)
while not os.path.exists("done"): time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("member", [0, 1])
def test_a_member_dies_and_the_job_does_not(launcher: Launcher, member: int) -> None:
    """The nodes agree on the next round at the remaining members, whichever member they used before."""
    launcher.script(SCRIPT)
    with EtcdCluster(members=3) as cluster:
        place = ("--rdzv-backend", "etcd", "--rdzv-endpoint", ",".join(cluster.endpoints))
        agents = [
            launcher.start("--nnodes", "2", *place, "--max-restarts", "1", "script.py") for _ in range(2)
        ]

        def workers(attempt: int) -> dict[int, int]:
            """Return the process of each rank."""
            found: dict[int, int] = {}
            for agent in agents:
                assert agent.stdout is not None
                match = re.search(rf"here (\d) (\d+) attempt {attempt}", agent.stdout.readline().decode())
                assert match, end(agent)
                found[int(match[1])] = int(match[2])
            return found

        first = workers(0)
        cluster.kill(member)
        os.kill(first[1], signal.SIGKILL)
        assert set(workers(1)) == {0, 1}
        (launcher.folder / "done").touch()
        for code, _, err in map(end, agents):
            assert code == 0, err
