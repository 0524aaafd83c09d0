"""What every cluster does. A new cluster is done when it passes this; `cluster_kinds` says how to add it."""

from __future__ import annotations

import io
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.cluster_kinds import KINDS, SILENCED, SLOTS, New, agents, parent_of
from tests.conformance.fits import FITS, lose_a_task_once

from ronde.comqueue import IterationStep, iterate
from ronde.errors import UsageError, WorkerError
from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Capacity, Cluster, Ticket
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.driver.functions import run_function
from ronde.launch.driver.job_store import reachable_by_tasks, tcp_addresses
from ronde.launch.driver.task_server import TaskConnection, TaskServer, TaskStreams
from ronde.launch.job_options import RunOptions
from ronde.net.authentication import Protection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECOND = 10**9
PATIENCE_S = 240  # against hanging only
ALL = None  # the slot of an event that concerns the whole request


class Desk:
    """The driver's end of tasks, and the events of their cluster."""

    def __init__(self) -> None:
        self._key = JobKey.generate()
        reachable, listening = reachable_by_tasks(LaunchConfig(WorkerSpec(argv=())))
        self.server = TaskServer(listening, self._key, PATIENCE_S * SECOND)
        self._addresses = tcp_addresses(reachable, self.server.address)
        self._events: queue.Queue[tuple[int | None, str]] = queue.Queue()
        self._streams: list[TaskStreams] = []

    def tickets(self, *slots: int) -> list[Ticket]:
        key = bytes.fromhex(self._key.hex())
        return [Ticket(slot, self._addresses, key, Protection.SEALED, 30 * SECOND) for slot in slots]

    def slot_ended(self, slot: int, reason: str) -> None:
        self._events.put((slot, reason))

    def all_ended(self, reason: str, is_loss: bool = False) -> None:
        self._events.put((ALL, reason))

    def tasks(self, count: int) -> dict[int, TaskConnection]:
        """Wait until this many tasks have registered; return them by slot."""
        found: dict[int, TaskConnection] = {}
        while len(found) < count:
            assert select.select([self.server], [], [], PATIENCE_S)[0], f"only {len(found)} tasks came"
            for task in self.server.accept():
                assert task.registration.slot not in found
                found[task.registration.slot] = task
        return found

    def event(self) -> tuple[int | None, str]:
        return self._events.get(timeout=PATIENCE_S)

    def start_agent(self, task: TaskConnection) -> TaskStreams:
        streams = task.accept()
        self._streams.append(streams)
        return streams

    def agent(self) -> int:
        """Return the process id of the agent that runs, once it does."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := agents()):
            assert time.monotonic() < deadline, "no agent runs"
            time.sleep(0.02)
        return found[0]

    def close(self) -> None:
        self.server.close()
        for streams in self._streams:
            streams.close()

    def has_events(self) -> bool:
        return not self._events.empty()


# All others: the engine of their name.
NEEDS = {
    "local": ("slow",),
    "ssh": ("hosts",),
    "slurm": ("root",),
    "spark-connect": ("spark",),
}


def _kinds() -> list[object]:
    marks = {kind: [getattr(pytest.mark, name) for name in NEEDS.get(kind, (kind,))] for kind in KINDS}
    return [pytest.param(kind, marks=marks[kind]) for kind in KINDS]


ENGINES = ("spark", "ray", "dask", "flink")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of the cluster."""
    return str(request.node.callspec.params["new_cluster"])


@pytest.fixture(scope="module", params=_kinds())
def new_cluster(request: pytest.FixtureRequest) -> Iterator[New]:
    with KINDS[request.param]() as new:
        yield new


@pytest.fixture
def cluster(new_cluster: New) -> Iterator[Cluster]:
    """A cluster whose slots are free at first, and which leaves no agent behind."""
    cluster = new_cluster()
    yield cluster
    cluster.cancel("the test is over")
    deadline = time.monotonic() + PATIENCE_S
    while agents():
        assert time.monotonic() < deadline, "agents still run"
        time.sleep(0.05)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_it_tells_its_slots_if_it_can(cluster: Cluster) -> None:
    assert cluster.name
    wait_for_capacity(cluster, SLOTS)


def test_each_ticket_gets_a_task_whose_end_is_reported(cluster: Cluster, desk: Desk) -> None:
    cluster.request(desk.tickets(0, 1), desk)
    tasks = desk.tasks(2)
    assert set(tasks) == {0, 1}
    wait_for_capacity(cluster, 0)
    assert not desk.has_events()
    for task in tasks.values():
        desk.start_agent(task).close_stdin()  # an agent without an assignment ends
    assert sorted([desk.event(), desk.event()]) == [(0, ""), (1, "")]


def test_a_task_that_fails_is_reported_with_a_reason(cluster: Cluster, desk: Desk) -> None:
    cluster.request(desk.tickets(0), desk)
    desk.tasks(1)[0].refuse("nobody waits for it")
    slot, reason = desk.event()
    assert slot in (0, ALL)
    assert reason
    assert "\n" not in reason


def test_a_task_that_is_killed_is_reported_with_a_reason(cluster: Cluster, desk: Desk) -> None:
    cluster.request(desk.tickets(0), desk)
    desk.start_agent(desk.tasks(1)[0])
    os.kill(parent_of(desk.agent()), signal.SIGKILL)
    slot, reason = desk.event()
    assert slot in (0, ALL)
    assert reason


def test_an_elastic_cluster_starts_another_task_in_a_slot(cluster: Cluster, desk: Desk) -> None:
    if not cluster.capabilities.elastic:
        pytest.skip("not elastic")
    cluster.request(desk.tickets(0, 1), desk)
    tasks = desk.tasks(2)
    desk.start_agent(tasks[1])
    tasks[0].refuse("nobody waits for it")
    assert desk.event()[0] == 0
    cluster.request(desk.tickets(0), desk)
    assert set(desk.tasks(1)) == {0}
    assert not desk.has_events()


def test_cancel_ends_all_tasks_from_any_thread_and_twice(
    new_cluster: New, cluster: Cluster, desk: Desk
) -> None:
    cluster.request(desk.tickets(*range(2 * SLOTS)), desk)  # the tasks of a gang wait for further slots
    for task in desk.tasks(0 if cluster.capabilities.gang else SLOTS).values():
        desk.start_agent(task)
    thread = threading.Thread(target=cluster.cancel, args=("the test wants it",))
    thread.start()
    thread.join()
    cluster.cancel("the test wants it once more")
    desk.server.close()  # as a driver does
    other, there = new_cluster(), Desk()
    other.request(there.tickets(*range(SLOTS)), there)
    assert len(there.tasks(SLOTS)) == SLOTS
    other.cancel("the test is over")
    there.close()


def test_nothing_is_cancelled_before_a_request(cluster: Cluster) -> None:
    cluster.cancel("too early")


def wait_for_capacity(cluster: Cluster, free: int) -> None:
    """Wait until the cluster tells that it has this number of free slots, which it may learn with a delay."""
    deadline = time.monotonic() + PATIENCE_S
    while (capacity := cluster.capacity()) not in (None, Capacity(SLOTS, free)):
        assert time.monotonic() < deadline, capacity
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in SILENCED])
def test_a_platform_that_does_not_answer_is_named(kind: str) -> None:
    with SILENCED[kind]() as cluster:
        with pytest.raises(UsageError, match=r"answers? at .*127\.0\.0\.1:\d+: "):
            cluster.capacity()
        with pytest.raises((UsageError, WorkerError), match=r"^(the|no) (Dask|Flink) .* answers? |is closed"):
            run(cluster, os.getpid)


# With a driver


def run(cluster: Cluster, fn: Any, *args: Any) -> list[Any]:
    options = RunOptions(SLOTS, stdout=io.StringIO(), stderr=io.StringIO())
    return run_function(cluster, fn, args, {}, options)


def test_a_function_runs_and_its_results_come_by_rank(cluster: Cluster) -> None:
    def work(size: int) -> tuple[int, int, int, bytes]:
        import ronde

        ronde.init()
        total = ronde.allreduce(ronde.rank() + 1, op=ronde.Sum)
        return ronde.rank(), ronde.local_rank(), int(total), bytes(size)

    large = 3_000_000
    assert run(cluster, work, large) == [(0, 0, 3, bytes(large)), (1, 1, 3, bytes(large))]


def test_an_iteration_gives_the_same_bits_as_elsewhere(cluster: Cluster) -> None:
    if cluster.capacity() is None:
        pytest.skip("an iteration takes as many tasks as the cluster tells")

    def step(c: IterationStep) -> None:
        c.state.total = c.state.total * 0.1 + c.sum(np.sin(c.data * c.step_no).sum(axis=0))

    def total(on: Any) -> list[float]:
        rows = np.arange(1000.0).reshape(100, 10)
        return list(iterate(step, data=rows, state={"total": 0.0}, max_iter=5, on=on).state.total)

    assert total(cluster) == total("threads:2")


@pytest.mark.parametrize("name", FITS)
def test_a_fit_of_files_gives_the_same_bits_as_elsewhere(
    name: str, cluster: Cluster, kind: str, tmp_path: Path
) -> None:
    if cluster.capacity() is None or (name != "k-means" and kind not in ENGINES):
        pytest.skip(
            "an iteration takes as many tasks as the cluster tells; one fit is enough for other kinds"
        )
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
    # Word2Vec has other shards of files than of lists.
    expected = FITS[name](tmp_path / "here" if name == "words" else None, "threads:3")
    assert FITS[name](tmp_path / "there", cluster) == expected


@pytest.mark.parametrize("name", [name for name in FITS if name != "k-means"])  # it saves no checkpoints
def test_a_fit_has_the_same_bits_after_a_lost_task(
    name: str, cluster: Cluster, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in ("spark", "ray"):
        pytest.skip("two kinds are enough")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
    expected = FITS[name](None, "threads:3")
    lose_a_task_once(monkeypatch, task_killer(), tmp_path / "lost", step_no=12)
    assert FITS[name](None, cluster) == expected
    assert (tmp_path / "lost").exists()


def test_an_exception_ends_the_job_and_the_next_one_runs(cluster: Cluster) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise LookupError("no such thing")
        time.sleep(600)

    with pytest.raises(WorkerError, match="LookupError: no such thing") as caught:
        run(cluster, fail)
    assert caught.value.rank == 1
    assert run(cluster, lambda: os.environ["RANK"]) == ["0", "1"]


def task_killer() -> Callable[[], None]:
    """Return a function that kills the process of the cluster that runs this worker's agent.

    It travels as a whole: a host that the test reaches by ssh does not find this module.
    """

    def parent(pid: int) -> int:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])

    def is_agent(pid: int) -> bool:
        with open(f"/proc/{pid}/cmdline") as file:
            return "agent_main" in file.read()

    def kill_task() -> None:
        pid = os.getppid()
        while not is_agent(pid):  # a template, from which the worker was forked
            pid = parent(pid)
        os.kill(parent(pid), signal.SIGKILL)

    return kill_task


def test_a_lost_task_ends_the_job(cluster: Cluster) -> None:
    kill_task = task_killer()

    def lose_the_task() -> None:
        if os.environ["RANK"] == "0":
            kill_task()
        time.sleep(600)

    with pytest.raises(WorkerError):
        run(cluster, lose_the_task)


@pytest.mark.parametrize("victim", ["task", "worker"])
def test_an_iteration_continues_after_a_loss_with_the_same_bits(
    cluster: Cluster, victim: str, tmp_path: Path
) -> None:
    if cluster.capacity() is None:
        pytest.skip("an iteration takes as many tasks as the cluster tells")
    # An earlier test may have killed a task, and with it a slot that its platform starts anew.
    wait_for_capacity(cluster, SLOTS)
    lost, steps, kill_task = tmp_path / "lost", tmp_path / "steps", task_killer()

    def step(c: IterationStep) -> None:
        if c.task_id == 1:
            with steps.open("a") as file:
                file.write(f"{c.step_no} ")
        if c.step_no == 7 and c.task_id == 1 and not lost.exists():
            lost.touch()
            if victim == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            kill_task()
            time.sleep(600)
        c.state.total = c.state.total * 0.1 + c.sum(np.sin(c.data * c.step_no).sum(axis=0))

    def total(on: Any, **options: Any) -> list[float]:
        rows = np.arange(1000.0).reshape(100, 10)
        return list(iterate(step, data=rows, state={"total": 0.0}, max_iter=20, on=on, **options).state.total)

    found = total(cluster, checkpoint_every=3, checkpoint_folder=str(tmp_path / "checkpoints"))
    # The task may have been lost before the other one had saved what it had after step 6.
    again = steps.read_text().split()[7:]
    assert again in ([*map(str, range(7, 21))], [*map(str, range(4, 21))])
    assert found == total("threads:2")


def test_a_cancelled_job_ends(cluster: Cluster) -> None:
    def cancel() -> None:
        while len(agents()) < SLOTS:
            time.sleep(0.05)
        cluster.cancel("the test wants it")

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(WorkerError):
        run(cluster, time.sleep, 600)
    thread.join()


def test_ctrl_c_reaches_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Also where the platform blocks SIGINT in its processes, as Ray does. Else they end only when time runs out."""

    def wait() -> None:
        mine = tmp_path / os.environ["RANK"]
        try:
            mine.touch()
            time.sleep(600)
        except KeyboardInterrupt:
            mine.write_text("interrupted")
            raise

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.iterdir())) < SLOTS and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(cluster, wait)
    thread.join()
    # An agent that learns of the interrupt from another one ends its rank by SIGTERM.
    assert "interrupted" in [(tmp_path / str(rank)).read_text() for rank in range(SLOTS)]
