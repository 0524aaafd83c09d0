"""The kinds of clusters that the conformance suite tests, each with two slots on this machine.

A kind is a function that starts the cluster's engine and yields a function that makes a `Cluster`, one for each job. A
new cluster adds its function to `KINDS`, and a marker of its name to pyproject.toml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.conformance.cutting_relay import CuttingRelay
from tests.conftest import MARK_NAME, MARK_VALUE
from tests.hosts import ssh

from ronde.launch.clusters.cluster import Cluster
from ronde.launch.clusters.local import PROGRAM, LocalCluster
from ronde.testing.hosts import Hosts

__all__ = [
    "KINDS",
    "SILENCED",
    "SLOTS",
    "New",
    "agent_of",
    "agents",
    "dask_scheduler",
    "engine_environment",
    "parent_of",
    "ray_engine",
]

SLOTS = 2
New = Callable[[], Cluster]


@contextmanager
def engine_environment() -> Iterator[None]:
    """Let what starts here carry this test run's mark under another name: an engine may outlive a single test."""
    os.environ["TEST_ENGINE_OF_RONDE"] = os.environ.pop(MARK_NAME)
    try:
        yield
    finally:
        os.environ[MARK_NAME] = os.environ.pop("TEST_ENGINE_OF_RONDE")


def agents() -> list[int]:
    """Return the process ids of the agents on clusters of this test run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"={MARK_VALUE}".encode() in (folder / "environ").read_bytes()
            if marked and _is_agent(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def agent_of(pid: int) -> int:
    """Return the agent above a rank: its parent, or that of the template from which it was forked."""
    while not _is_agent(pid):
        pid = parent_of(pid)
    return pid


def _is_agent(pid: int) -> bool:
    return b"ronde.launch.driver.agent_main" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def parent_of(pid: int) -> int:
    """Return the process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def _local() -> Iterator[New]:
    """Run tasks as processes of this machine."""
    yield lambda: LocalCluster(SLOTS)


@contextmanager
def _ssh() -> Iterator[New]:
    """Run tasks on another host, which is a network namespace with an sshd."""
    if reason := ssh.require():
        pytest.skip(reason)
    with Hosts(1) as world, ssh.SshServers(world, {MARK_NAME: MARK_VALUE}) as servers:
        yield lambda: LocalCluster(SLOTS, (servers.client, world.ipv4(0), *PROGRAM))


@contextmanager
def _slurm() -> Iterator[New]:
    """Run tasks as steps on a Slurm of two nodes, each a job of its own. `ronde run` under srun needs no cluster."""
    from tests.clusters.slurm import Slurm, require  # which few tests need

    if reason := require():
        pytest.skip(reason)
    with engine_environment():
        slurm = Slurm([f"n{number}" for number in range(SLOTS)])
        slurm.__enter__()
    with ExitStack() as stack:
        stack.push(slurm)
        configuration = pytest.MonkeyPatch()
        stack.callback(configuration.undo)
        configuration.setenv("SLURM_CONF", slurm.environ()["SLURM_CONF"])
        yield lambda: LocalCluster(SLOTS, ("srun", "--quiet", "--nodes=1", "--ntasks=1", *PROGRAM))


@contextmanager
def ray_engine() -> Iterator[None]:
    """Start Ray with two CPUs, and connect this process to it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed here")
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        with engine_environment():
            ray.init(
                num_cpus=SLOTS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=80 << 20,
                _temp_dir=folder,
            )
        try:
            ray.get([ray.remote(agents).remote() for _ in range(SLOTS)])  # opens what the first task opens
            yield
        finally:
            ray.shutdown()


@contextmanager
def _ray() -> Iterator[New]:
    with ray_engine():
        from ronde.ray import RayCluster

        yield RayCluster


DASK = """
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        print(cluster.scheduler_address, flush=True)
        input()
"""


@contextmanager
def dask_scheduler() -> Iterator[str]:
    """Start a Dask scheduler with two workers of one thread; yield its address."""
    pytest.importorskip("distributed", reason="Dask is not installed here")
    with engine_environment():
        process = subprocess.Popen(
            [sys.executable, "-c", DASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert process.stdout is not None
    with process:  # closes its standard input, and waits for its end
        yield process.stdout.readline().strip()


@contextmanager
def _dask() -> Iterator[New]:
    with dask_scheduler() as address:
        from distributed import Client

        from ronde.dask import DaskCluster

        with Client(address) as client:
            yield lambda: DaskCluster(client)


@contextmanager
def _spark() -> Iterator[New]:
    from tests.clusters.spark_session import session_of_two_executors  # which needs this module

    with session_of_two_executors() as session:
        from ronde.spark import SparkCluster

        yield lambda: SparkCluster(session.sparkContext, is_elastic=True)


@contextmanager
def _spark_connect() -> Iterator[New]:
    """Run tasks on a server of Spark Connect with two executors, which is a process of its own."""
    pytest.importorskip("pyspark", reason="PySpark is not installed here")
    pytest.importorskip("grpc_status", reason="the packages of Spark Connect are not installed here")
    from pyspark.sql.connect.session import SparkSession
    from tests.clusters.spark_session import connect_server

    from ronde.spark.connect_cluster import ConnectCluster

    with connect_server() as url:
        session = SparkSession.builder.remote(url).create()
        try:
            yield lambda: ConnectCluster(session)
        finally:
            session.stop()


@contextmanager
def _flink() -> Iterator[New]:
    from tests.clusters.flink_cluster import flink_cluster  # which needs this module

    with flink_cluster() as flink:
        from ronde.flink import FlinkCluster

        yield lambda: FlinkCluster(flink.settings)


@contextmanager
def _silenced_dask() -> Iterator[Cluster]:
    with dask_scheduler() as address:
        import dask
        from distributed import Client

        from ronde.dask import DaskCluster

        with (
            dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
            silenced(address.removeprefix("tcp://")) as (there, silence),
            Client(f"tcp://{there}") as client,
        ):
            cluster = DaskCluster(client)
            silence()
            yield cluster


@contextmanager
def _silenced_flink() -> Iterator[Cluster]:
    from tests.clusters.flink_cluster import flink_cluster

    with flink_cluster() as flink:
        from ronde.flink import FlinkCluster

        with silenced(f"127.0.0.1:{flink.settings['rest.port']}") as (there, silence):
            cluster = FlinkCluster({**flink.settings, "rest.port": there.rpartition(":")[2]})
            silence()
            yield cluster


@contextmanager
def silenced(address: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield another address, host and port, of what listens at this one, and a function after which none answers there.

    What listens goes on, for others.
    """
    host, _, port = address.rpartition(":")
    relay = CuttingRelay(lambda: (host, int(port)), seed=0, most=1 << 60)
    with ExitStack() as stack:
        stack.callback(relay.close)
        yield relay.address.removeprefix("tcp:"), stack.close


# By kind, a cluster whose platform has stopped answering since it was made. The others need nobody's answer.
SILENCED: dict[str, Callable[[], AbstractContextManager[Cluster]]] = {
    "dask": _silenced_dask,
    "flink": _silenced_flink,
}

KINDS: dict[str, Callable[[], AbstractContextManager[New]]] = {
    "local": _local,
    "ssh": _ssh,
    "slurm": _slurm,
    "spark": _spark,
    "spark-connect": _spark_connect,
    "ray": _ray,
    "dask": _dask,
    "flink": _flink,
}
