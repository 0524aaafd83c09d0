"""Stores of rendezvous that lose their memory get it back from the nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conformance.rendezvous_nodes import S, TestNode
from tests.conformance.test_rendezvous import BOOM, Job

from ronde.job_key import JobKey
from ronde.rendezvous.membership import AllSucceeded, JobClosed, Notice, WorkerFailed
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.stores.file import FileStore
from ronde.stores.server import StoreServer


def succeed(*nodes: TestNode) -> None:
    """End the job well; the first node, which leads, goes last."""
    for node in nodes:
        node.rendezvous.succeed()
    for node in reversed(nodes):
        node.expect(AllSucceeded)
        node.close()


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
    succeed(a, b)
    server.close()


def test_deleted_keys_come_back(tmp_path: Path) -> None:
    job = Job(RendezvousConfig("file", str(tmp_path / "meeting"), "job", heartbeat_ns=S // 2))
    a, b = job.start("a", "b")
    a.begins(), b.begins()
    assert a.is_told_nothing(1)
    store = FileStore(tmp_path / "meeting")
    store.delete_prefix("rendezvous/")
    store.close()
    assert a.is_told_nothing(1)
    succeed(a, b)


@pytest.mark.slow
def test_a_store_that_is_started_again_before_the_first_round(tmp_path: Path) -> None:
    """No other node's store can replace it yet, and the machine refuses the connection at once."""
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)
    endpoint = server.address.removeprefix("tcp:")
    job = Job(RendezvousConfig("tcp", endpoint, tmp_path.name, options={"is_host": "no"}))
    job.key = key
    a = job.add("a", min_nodes=2, max_nodes=2)
    a.expect(Notice)  # it waits for another one
    server.close()
    assert a.is_told_nothing(1)
    server = StoreServer(f"tcp:{endpoint}", key)
    b = job.add("b", min_nodes=2, max_nodes=2)
    assert a.begins().nodes == b.begins().nodes
    succeed(a, b)
    server.close()


@pytest.mark.slow
def test_the_loss_of_the_store_after_the_end_of_the_job_is_harmless(tmp_path: Path) -> None:
    """Workers may take long to exit; nodes ask nothing of the store any more, and it may go."""
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)
    endpoint = server.address.removeprefix("tcp:")
    config = RendezvousConfig("tcp", endpoint, tmp_path.name, heartbeat_ns=S // 5, options={"is_host": "no"})
    job = Job(config)
    job.key = key
    a, b = job.start("a", "b")
    a.begins(), b.begins()
    b.rendezvous.end_job("that is all")
    for node in (a, b):
        node.expect(JobClosed)
    time.sleep(3)  # longer than a silent store is tolerated
    for node in (a, b):
        assert node.rendezvous.events() == []
        node.close()
    server.close()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_newcomer_takes_over_when_all_of_the_last_round_have_ended(tmp_path: Path, leaves: bool) -> None:
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)
    endpoint = server.address.removeprefix("tcp:")
    config = RendezvousConfig("tcp", endpoint, tmp_path.name, 1, 2, heartbeat_ns=S // 2, last_call_ns=S // 2)
    job = Job(replace(config, options={"is_host": "no"}))
    job.key = key
    a = job.add("a")
    a.begins()
    if leaves:
        a.rendezvous.leave("that is all")
    a.close()
    b = job.add("b")
    assert [node.id for node in b.begins().nodes] == ["b"]
    b.rendezvous.succeed()
    b.expect(AllSucceeded)
    b.close()
    server.close()
