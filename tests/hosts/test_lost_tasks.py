"""An iteration that loses a task on one of two hosts, without a folder that the hosts share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.conftest import MARK_NAME, MARK_VALUE
from tests.hosts import ssh
from tests.hosts.alternating_hosts import AlternatingHosts, task_programs
from tests.ranks.comqueue import kmeans

from ronde.testing.hosts import Hosts

pytestmark = pytest.mark.hosts


def test_the_driver_keeps_the_checkpoints_of_both_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if reason := ssh.require():
        pytest.skip(reason)
    flag, steps = tmp_path / "died", tmp_path / "steps"
    expected, _ = kmeans.noisy_queue(str(tmp_path)).exec("threads:2")[0]
    queue = kmeans.noisy_queue(str(flag), how="lose").add(kmeans.StepLog(str(steps))).set_checkpoint(every=2)
    with Hosts(2) as hosts, ssh.SshServers(hosts, {MARK_NAME: MARK_VALUE}) as servers:
        mean, _ = queue.exec(AlternatingHosts(2, task_programs(hosts, servers)))[0]
    assert flag.exists()
    assert np.array_equal(mean, expected)
    again = list(map(int, steps.read_text().split()))[6:]  # the checkpoint of step 6 may be missing
    assert again in ([*range(7, 21)], [*range(5, 21)])
    assert "WARNING" not in capfd.readouterr().err
