"""Stores of rendezvous that lose their memory get it back from the nodes."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.rendezvous_nodes import S
from tests.conformance.test_rendezvous import BOOM, Job

from ronde.core.round import AllSucceeded, WorkerFailed
from ronde.job_key import JobKey
from ronde.net.rendezvous.config import RendezvousConfig
from ronde.net.stores.file import FileStore
from ronde.net.stores.server import StoreServer


def test_a_store_that_comes_back_without_its_memory_gets_it_from_the_nodes(tmp_path: Path) -> None:
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)
    endpoint = server.address.removeprefix("tcp:")
    config = RendezvousConfig(
        "tcp", endpoint, tmp_path.name, heartbeat_ns=S // 2, options={"is_host": "no", "rehost": "no"}
    )
    job = Job(config)
    job.key = key
    a, b = job.start("a", "b")
    assert [node.begins().number for node in (a, b)] == [0, 0]
    server.close()
    server = StoreServer(f"tcp:{endpoint}", key)
    assert a.is_told_nothing(1)
    b.rendezvous.fail(BOOM)
    for node in (a, b):
        assert node.ends().cause == WorkerFailed(BOOM)
    for node in (a, b):
        node.join()
    assert [node.begins().restarts for node in (a, b)] == [1, 1]
    for node in (a, b):
        node.rendezvous.succeed()
    for node in (b, a):
        node.expect(AllSucceeded)
        node.close()
    server.close()


def test_keys_that_somebody_has_deleted_come_back(tmp_path: Path) -> None:
    job = Job(RendezvousConfig("file", str(tmp_path / "meeting"), "job", heartbeat_ns=S // 2))
    a, b = job.start("a", "b")
    a.begins(), b.begins()
    assert a.is_told_nothing(1)
    store = FileStore(tmp_path / "meeting")
    store.delete_prefix("rendezvous/")
    store.close()
    assert a.is_told_nothing(1)
    for node in (a, b):
        node.rendezvous.succeed()
    for node in (b, a):
        node.expect(AllSucceeded)
        node.close()
