"""The behaviour of every rendezvous. A new one is done when it passes these tests."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conformance.etcd_cluster import EtcdCluster
from tests.conformance.rendezvous_nodes import LONG_S, ONE_RESTART, ProcessNode, S, TestNode
from tests.ports import free_port

from ronde.errors import UsageError
from ronde.rendezvous.alone import Alone
from ronde.rendezvous.membership import (
    AllSucceeded,
    Budget,
    Failure,
    JobClosed,
    NodesLost,
    NodesWaiting,
    RendezvousBroken,
    WorkerFailed,
)
from ronde.rendezvous.rendezvous import Rendezvous, RendezvousConfig, create, register
from ronde.settings import JobKey
from ronde.stores.server import StoreServer

BOOM = Failure(3, 1, "host-b", 123, 1, "ValueError: boom")


class Job:
    """Nodes of one job, closed at the end."""

    def __init__(self, config: RendezvousConfig) -> None:
        self.config = config
        self.key = JobKey.generate()
        self.nodes: list[TestNode | ProcessNode] = []
        self.count = 0

    def configure(self, **changes: object) -> RendezvousConfig:
        """The next node's; the ranks of `static` are dealt out."""
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        if config.backend == "static" and config.node_rank < 0:
            config = replace(
                config, node_rank=min(self.count, config.max_nodes - 1), min_nodes=config.max_nodes
            )
        self.count += 1
        return config

    def add(self, name: str, budget: Budget = ONE_RESTART, wish: int = -1, **changes: object) -> TestNode:
        node = TestNode(self.configure(**changes), self.key, name, budget, wish)
        self.nodes.append(node)
        return node

    def add_process(self, name: str, **changes: object) -> ProcessNode:
        node = ProcessNode(self.configure(**changes), self.key, name)
        self.nodes.append(node)
        return node

    def start(self, *names: str, **changes: object) -> list[TestNode]:
        """Nodes that are in the first round together, in this order."""
        exact = {"min_nodes": len(names), "max_nodes": len(names), "last_call_ns": 3600 * S, **changes}
        return [self.add(name, **exact) for name in names]  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["static", "tcp", "file", "etcd"])
def meeting(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Return the backend, and where its etcd is if it needs one."""
    if request.param != "etcd":
        yield request.param, ""
        return
    with EtcdCluster() as cluster:
        yield request.param, ",".join(cluster.endpoints)


def local_endpoint() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1')}"


@pytest.fixture
def job(meeting: tuple[str, str], tmp_path: Path) -> Iterator[Job]:
    backend, endpoint = meeting
    if not endpoint:
        endpoint = str(tmp_path / "meeting") if backend == "file" else f"127.0.0.1:{free_port('127.0.0.1')}"
    job = Job(
        RendezvousConfig(
            backend,
            endpoint,
            tmp_path.name,
            join_timeout_ns=50 * S,
            last_call_ns=S // 10,
            heartbeat_ns=S,  # where a node is lost, the others wait until its lease has run out
        )
    )
    yield job
    for node in reversed(job.nodes):  # the first one may serve the store
        node.close()


def dynamic(job: Job) -> Job:
    if job.config.backend == "static":
        pytest.skip("the nodes of `static` are given")
    return job


def test_nodes_meet_and_succeed_together(job: Job) -> None:
    nodes = job.start("a", "b", "c")
    rounds = [node.begins() for node in nodes]
    assert {round.nodes for round in rounds} == {rounds[0].nodes}
    assert sorted(round.group_rank for round in rounds) == [0, 1, 2]
    assert [rounds[0].nodes[round.group_rank].id for round in rounds] == ["a", "b", "c"]
    if job.config.backend == "static":
        assert [round.group_rank for round in rounds] == [0, 1, 2]
    for node in nodes[:2]:
        node.rendezvous.succeed()
    assert nodes[0].is_told_nothing()
    nodes[2].rendezvous.succeed()
    for node in nodes:
        assert node.expect(AllSucceeded).number == 0
    late = job.add("d", min_nodes=3, max_nodes=3, heartbeat_ns=S // 2)
    reason = late.expect(RendezvousBroken).reason
    assert "has completed, and nodes of it on host-a, host-b, host-c are still there" in reason


def test_a_node_that_comes_back_does_not_begin_a_job_again_that_runs_once(job: Job) -> None:
    nodes = job.start("a", "b")
    for node in nodes:
        node.begins()
        node.rendezvous.succeed()
    for node in nodes:
        node.expect(AllSucceeded)
    if job.config.backend in ("file", "etcd"):  # else the nodes have the store
        for node in nodes:
            node.close()
    late = job.add("c", min_nodes=2, max_nodes=2, options={**job.config.options, "run_once": "true"})
    closed = late.expect(JobClosed)
    assert closed.completed
    assert closed.reason == "the job has completed"


def test_a_second_job_at_the_same_place(job: Job) -> None:
    server = None
    if job.config.backend == "tcp":
        server = StoreServer("tcp:127.0.0.1:0", job.key)
        endpoint = server.address.removeprefix("tcp:")
        job.config = replace(job.config, endpoint=endpoint, options={"is_host": "false"})
    for names, boom in (("ab", False), ("cd", True), ("ef", False)):
        job.count = 0  # ranks of `static`
        nodes = job.start(*names, budget=Budget(0))
        assert [node.begins().number for node in nodes] == [0, 0]
        if boom:
            nodes[0].rendezvous.fail(BOOM)
        for node in nodes:
            if not boom:
                node.rendezvous.succeed()
        for node in nodes:
            node.expect(JobClosed if boom else AllSucceeded)
        for node in reversed(nodes):
            node.close()
    if server:
        server.close()


def test_a_failure_ends_the_round_for_all_and_the_second_one_the_job(job: Job) -> None:
    nodes = job.start("a", "b")
    first = [node.begins() for node in nodes]
    nodes[1].rendezvous.fail(BOOM)
    for node in nodes:
        assert node.ends().cause == WorkerFailed(BOOM)
    for node in nodes:
        node.join()
    second = [node.begins() for node in nodes]
    assert [round.nodes for round in second] == [first[0].nodes] * 2
    assert [(round.number, round.restarts, round.changes) for round in second] == [(1, 1, 0)] * 2
    nodes[0].rendezvous.fail(replace(BOOM, message="again"))
    for node in nodes:
        closed = node.expect(JobClosed)
        assert closed.failure == replace(BOOM, message="again")
    late = job.add("c", min_nodes=2, max_nodes=2, heartbeat_ns=S // 2)
    assert (
        "(again on host-b), and nodes of it on host-a, host-b are still there"
        in late.expect(RendezvousBroken).reason
    )


def test_a_lost_node_is_noticed_at_once_and_the_others_go_on(job: Job) -> None:
    a, b, c = dynamic(job).start("a", "b", "c", min_nodes=2)
    first = [node.begins() for node in (a, b, c)]
    c.close()
    for node in (a, b):
        cause = node.ends().cause
        assert isinstance(cause, NodesLost)
        assert [each.id for each in cause.nodes] == ["c"]
        assert "host-c" in cause.reason
        node.join()
    for node, before in zip((a, b), first):
        round = node.begins()
        assert (round.number, round.restarts, round.changes) == (1, 0, 1)
        assert len(round.nodes) == 2
        if before.group_rank < 2:
            assert round.group_rank == before.group_rank


def test_a_late_node_waits_and_comes_in(job: Job) -> None:
    a, b = (dynamic(job).add(name, min_nodes=2, max_nodes=3, last_call_ns=S // 2) for name in "ab")
    before = [node.begins() for node in (a, b)]
    assert len(before[0].nodes) == 2
    late = job.add("c", min_nodes=2, max_nodes=3, last_call_ns=S // 2)
    for node in (a, b):
        assert node.ends().cause == NodesWaiting(1)
        node.join()
    after = [node.begins() for node in (a, b, late)]
    assert [round.group_rank for round in after] == [before[0].group_rank, before[1].group_rank, 2]


def test_a_lost_node_comes_back_at_once(job: Job) -> None:
    a, b = dynamic(job).start("a", "b", min_nodes=1)
    a.begins(), b.begins()
    b.close()
    a.ends()
    assert len(a.join().begins().nodes) == 1
    again = job.add("b2", min_nodes=1, max_nodes=2, last_call_ns=3600 * S)
    assert a.ends().cause == NodesWaiting(1)
    assert len(a.join().begins().nodes) == len(again.begins().nodes) == 2


def test_a_spare_takes_over(job: Job) -> None:
    a, b = dynamic(job).start("a", "b", spares=1)
    a.begins(), b.begins()
    spare = job.add("c", min_nodes=2, max_nodes=2, spares=1)
    assert spare.is_told_nothing(1)
    b.close()
    a.ends()
    round = a.join().begins()
    assert [node.id for node in round.nodes] in (["a", "c"], ["c", "a"])
    assert spare.begins().nodes == round.nodes


def test_a_node_leaves(job: Job) -> None:
    a, b = dynamic(job).start("a", "b", min_nodes=1)
    a.begins(), b.begins()
    a.rendezvous.leave("its machine is needed elsewhere")
    cause = b.ends().cause
    assert isinstance(cause, NodesLost)
    assert cause.reason == "host-a left: its machine is needed elsewhere"
    if job.config.backend != "tcp":  # there it served the store
        a.close()
        assert len(b.join().begins().nodes) == 1


def test_the_job_is_ended_for_all(job: Job) -> None:
    nodes = job.start("a", "b")
    for node in nodes:
        node.begins()
    nodes[1].rendezvous.end_job("interrupted by Ctrl-C")
    for node in nodes:
        assert node.expect(JobClosed) == JobClosed("host-b: interrupted by Ctrl-C")


def test_of_two_that_end_the_job_and_go_the_first_is_its_cause(job: Job) -> None:
    a, b, c = job.start("a", "b", "c")
    for node in (a, b, c):
        node.begins()
    for node in (b, c):
        node.rendezvous.end_job("interrupted by Ctrl-C")
        node.close()
    assert a.expect(JobClosed) == JobClosed("host-b: interrupted by Ctrl-C")


def test_nodes_with_different_terms_get_the_difference(job: Job) -> None:
    a, b = job.start("a", "b")
    a.begins(), b.begins()
    late = job.add("c", Budget(7), min_nodes=2, max_nodes=2)
    reason = late.expect(RendezvousBroken).reason
    assert "max_restarts=7 where the job has 1" in reason
    assert "host-c" in reason


def test_nodes_get_the_group_ranks_that_they_wish(job: Job) -> None:
    dynamic(job)
    nodes = [job.add(name, wish=2 - rank, min_nodes=3, max_nodes=3) for rank, name in enumerate("abc")]
    assert [node.begins().group_rank for node in nodes] == [2, 1, 0]


def test_the_error_of_too_few_nodes_says_how_many_are_here(job: Job) -> None:
    alone = job.add("a", min_nodes=2, max_nodes=2, join_timeout_ns=S)
    reason = alone.expect(RendezvousBroken).reason
    assert "waited 1 s for all nodes: 1 of 2 nodes is here" in reason


@pytest.fixture
def processes(job: Job) -> Iterator[list[ProcessNode]]:
    """Three nodes that are processes of their own, in a round together, at a store that none of them serves."""
    server = None
    config = replace(dynamic(job).config, min_nodes=1, max_nodes=3, last_call_ns=50 * S, heartbeat_ns=S // 2)
    if config.backend == "tcp":
        server = StoreServer("tcp:127.0.0.1:0", job.key)
        config = replace(config, endpoint=server.address.removeprefix("tcp:"), options={"is_host": "false"})
    job.config = config
    nodes = [job.add_process(name) for name in "abc"]
    for node in nodes:
        assert node.says("began").startswith("0 3")
    yield nodes
    for node in nodes:
        node.close()
    if server:
        server.close()


def test_killed_nodes_are_noticed_and_the_others_go_on(processes: list[ProcessNode]) -> None:
    a, b, c = processes
    for number, (killed, left) in enumerate([(a, [b, c]), (b, [c])], 1):  # so that each leader dies
        killed.signal(signal.SIGKILL)
        for node in left:
            told = node.says("ended")  # etcd's shortest lease is longer than three of these heartbeats
            assert re.search(f"host-{killed.name} (lost the connection|was silent)", told)
        for node in left:
            assert node.says("began").startswith(f"{number} {len(left)}")
    c.succeed()
    c.says("AllSucceeded")


@pytest.mark.parametrize("which", [0, *(pytest.param(which, marks=pytest.mark.slow) for which in (1, 2))])
def test_a_stopped_node_is_noticed_ejected_and_taken_back(processes: list[ProcessNode], which: int) -> None:
    stopped = processes.pop(which)
    stopped.stop()
    for node in processes:
        assert f"host-{stopped.name} was silent for 1.5 s" in node.says("ended")
    for node in processes:
        assert node.says("began").startswith("1 2")
    stopped.signal(signal.SIGCONT)
    stopped.says("ejected")
    for node in (*processes, stopped):  # on a machine that does much else it may be silent once more
        while not node.says("began").partition(" ")[2].startswith("3"):
            pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[ProcessNode]]:
    """Three nodes that are processes, in a round together; the first one serves the store."""
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    job = Job(RendezvousConfig("tcp", endpoint, tmp_path.name, 1, 3, last_call_ns=50 * S, heartbeat_ns=S))
    nodes = [job.add_process(name, options={"is_host": str(name == "a")}) for name in "abc"]
    for node in nodes:
        assert node.says("began").startswith("0 3")
    yield nodes
    for node in nodes:
        node.close()


def test_the_store_dies_with_its_node_and_the_others_go_on_at_another(served: list[ProcessNode]) -> None:
    # The second one serves the store by then, as it is the next.
    for number, dying in enumerate(served[:2], 1):
        left = served[number:]
        dying.signal(signal.SIGKILL)
        for node in left:
            assert f"host-{dying.name}" in node.says("ended")
        for node in left:
            assert node.says("began").startswith(f"{number} {len(left)}")
    served[2].succeed()
    served[2].says("AllSucceeded")


def test_a_node_is_lost_and_then_the_one_with_the_store(tmp_path: Path) -> None:
    """Between two rounds, so it is not known whether the first one was here: but one could do nothing elsewhere."""
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    job = Job(RendezvousConfig("tcp", endpoint, tmp_path.name, 1, 3, last_call_ns=50 * S, heartbeat_ns=S))
    a, b, c = [job.add(name, options={"is_host": str(name == "a")}) for name in "abc"]
    for node in (a, b, c):
        node.begins()
    c.close()
    for node in (a, b):
        node.ends()
    b.join()
    a.close()  # its workers have not ended yet
    assert [node.id for node in b.begins().nodes] == ["b"]
    b.rendezvous.succeed()
    b.expect(AllSucceeded)
    b.close()


def test_the_node_that_served_the_store_finds_the_others_when_it_comes_back(
    served: list[ProcessNode],
) -> None:
    a, b, c = served
    a.signal(signal.SIGKILL)
    for node in (b, c):
        assert node.says("began").startswith("1 2")
    back = ProcessNode(a.config, a.key, "a2")
    served.append(back)
    for node in (b, c, back):
        assert node.says("began").startswith("2 3")


def test_a_node_without_the_store_and_a_quorum_waits_for_others(tmp_path: Path) -> None:
    """A node that comes to the endpoint is redirected."""
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    job = Job(RendezvousConfig("tcp", endpoint, tmp_path.name, 2, 3, last_call_ns=S // 2, heartbeat_ns=S))
    nodes = a, b = [job.add_process(name, options={"is_host": str(name == "a")}) for name in "ab"]
    try:
        for node in (a, b):
            assert node.says("began").startswith("0 2")
        a.signal(signal.SIGKILL)
        b.says("ended")
        nodes.append(job.add_process("c"))
        for node in nodes[1:]:
            assert node.says("began").startswith("1 2")
        for node in nodes[1:]:
            node.succeed()
        for node in nodes[1:]:  # no thread is left waiting at the store where c had been
            assert node.process.wait(LONG_S) == 0
    finally:
        for node in nodes:
            node.close()


@pytest.mark.slow
def test_the_store_dies_and_that_is_the_end_if_it_is_not_to_be_replaced(tmp_path: Path) -> None:
    job = Job(
        RendezvousConfig(
            "tcp", f"127.0.0.1:{free_port('127.0.0.1')}", tmp_path.name, options={"rehost": "no"}
        )
    )
    server = StoreServer(f"tcp:{job.config.endpoint}", job.key)
    node = job.start("a")[0]
    node.begins()
    server.close()
    assert "lost the store" in node.expect(RendezvousBroken).reason
    node.close()


# Bad input


def test_others_can_register_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.rendezvous.rendezvous._registered", {})
    made: list[RendezvousConfig] = []

    def make(config: RendezvousConfig, key: JobKey) -> Rendezvous:
        made.append(config)
        return Alone(config)

    register("ours", make)
    create(RendezvousConfig("ours"), JobKey.generate()).close()
    assert made
    with pytest.raises(UsageError, match="already"):
        register("ours", make)
    with pytest.raises(UsageError, match="already"):
        register("tcp", make)


def test_a_node_alone_starts_again_after_a_failure() -> None:
    node = TestNode(RendezvousConfig(), JobKey.generate(), "a")
    assert node.begins().nodes == (node.node,)
    node.rendezvous.fail(BOOM)
    assert node.ends().cause == WorkerFailed(BOOM)
    assert node.join().begins().restarts == 1
    node.rendezvous.succeed()
    assert node.expect(AllSucceeded).number == 1
    node.close()


def test_alone_it_ends() -> None:
    failing, interrupted = (
        TestNode(RendezvousConfig(), JobKey.generate(), "a", Budget(0)),
        TestNode(RendezvousConfig(), JobKey.generate(), "a"),
    )
    failing.begins(), interrupted.begins()
    failing.rendezvous.fail(BOOM)
    assert failing.expect(JobClosed).failure == BOOM
    interrupted.rendezvous.end_job("Ctrl-C")
    assert "Ctrl-C" in interrupted.expect(JobClosed).reason
    failing.close()
    interrupted.close()
