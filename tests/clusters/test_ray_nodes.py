"""Ronde on a Ray cluster of two nodes with one CPU each: where workers run, and what follows the loss of a node."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.cluster_kinds import engine_environment

from ronde.errors import WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ray: Any = pytest.importorskip("ray", reason="Ray is not installed here")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Any]]:
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        with engine_environment():
            head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            second = cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield [cluster, second]
        ray.shutdown()
        cluster.shutdown()


def node_of_the_task() -> str:
    """Return what Ray's worker process, the parent of the agent, says about its node."""
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        variables = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if b"=" in each)
    return variables[b"RAY_RAYLET_PID"].decode()


def test_hosts_get_equally_many_workers_and_a_lost_node_ends_them(nodes: list[Any]) -> None:
    from ronde.ray import RayExecutor

    cluster, second = nodes
    workers = RayExecutor(num_hosts=2, num_workers_per_host=1)
    workers.start()
    assert len(set(workers.run(node_of_the_task))) == 2
    references = workers.run_remote(time.sleep, [600])
    cluster.remove_node(second, allow_graceful=False)
    with pytest.raises(WorkerError):
        ray.get(references)
    workers.shutdown()
