"""An agent that loses its etcd for a while reports that, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.etcd_cluster import EtcdCluster
from tests.ranks.launcher.test_launcher import Launcher, end
from tests.ranks.launcher.test_several_agents import HERE, UNTIL_DONE, hear

CONF = "keep_alive_interval=1,last_call_timeout=0.1"


@pytest.mark.slow
def test_a_lost_etcd_is_reported_in_one_line_and_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_JOB_KEY", "ab" * 32)
    launcher = Launcher(tmp_path)
    launcher.script(HERE + UNTIL_DONE)
    with EtcdCluster() as cluster:
        place = ("--rdzv-backend", "etcd", "--rdzv-endpoint", cluster.endpoints[0], "--rdzv-conf", CONF)
        agent = launcher.start("--nnodes", "1:2", *place, "script.py")
        try:
            hear(agent, 1)
            cluster.kill(0)
            assert agent.stderr
            said = [line.decode() for line in (agent.stderr.readline(), agent.stderr.readline())]
            cluster.start(0)
            hear(agent, 1)  # its workers had been ended
            (tmp_path / "done").touch()
            code, _, err = end(agent)
        finally:
            agent.kill()
            agent.communicate()
    assert said[0].startswith(f"ronde: the store at etcd:{cluster.endpoints[0]}/rendezvous/")
    assert said[0].endswith("; after 3 s the workers here leave their world or are ended\n")
    assert said[1] == "ronde: the store has not answered for 3 s\n"
    assert code == 0
    assert all(line.startswith("ronde: ") for line in err.splitlines()), err
