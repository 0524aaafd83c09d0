"""Agents that wait for the next task of a process: real agents, and tasks that are threads of this process."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cluster_kinds import agent_of

from ronde.errors import WorkerError
from ronde.launch.clusters.base import Capabilities, SlotEvents, Ticket
from ronde.launch.driver import kept_agents
from ronde.launch.driver.functions import run_function
from ronde.launch.driver.task import run_task
from ronde.launch.job_options import RunOptions

pytestmark = pytest.mark.slow

PATIENCE_S = 60  # against hanging only


class ThreadCluster:
    """Runs each task in a thread of this process."""

    name = "threads"
    capabilities = Capabilities(elastic=False, gang=False)

    def capacity(self) -> None:
        """Return nothing: threads are not limited."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        self._threads = [threading.Thread(target=self._run, args=(ticket, events)) for ticket in tickets]
        for thread in self._threads:
            thread.start()

    def cancel(self, reason: str) -> None:
        """Do nothing: tasks end with their driver."""

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, ticket: Ticket, events: SlotEvents) -> None:
        reason = ""
        try:
            run_task(ticket, keeps_agent=True)
        except Exception as error:
            reason = str(error)
        events.slot_ended(ticket.slot, reason)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    yield
    assert kept_agents.take_agent([], {}) is None  # ends all


def run(fn: Callable[..., Any], *args: Any, ranks: int = 1, **environment: str) -> list[Any]:
    cluster, output = ThreadCluster(), io.StringIO()
    options = RunOptions(ranks, env=environment, stdout=output, stderr=output, verbose=0)
    try:
        return run_function(cluster, fn, args, {}, options)
    finally:
        cluster.join()


def places() -> tuple[int, int, str | None]:
    """Return the processes of the agent and of this rank, and a variable."""
    return agent_of(os.getpid()), os.getpid(), os.environ.get("GREETING")


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_the_next_task_has_the_same_agent_and_a_new_rank() -> None:
    first = run(places, ranks=2, GREETING="hello")
    second = run(places, ranks=2, GREETING="hi")
    assert {agent for agent, _, _ in first} == {agent for agent, _, _ in second}
    assert not {rank for _, rank, _ in first} & {rank for _, rank, _ in second}
    assert [greeting for _, _, greeting in (*first, *second)] == ["hello", "hello", "hi", "hi"]


def test_ranks_of_the_next_job_compute_together() -> None:
    def total(factor: int) -> float:
        import ronde

        ronde.init()
        return float(ronde.allreduce(float(factor * (ronde.rank() + 1)), op=ronde.Sum))

    assert [run(total, factor, ranks=2) for factor in (1, 10, 100)] == [[3.0] * 2, [30.0] * 2, [300.0] * 2]


def test_an_agent_that_was_started_in_another_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(places)[0][0]
    monkeypatch.setenv("GREETING", "of the task")
    agent, _, greeting = run(places)[0]
    assert (agent != first, greeting) == (True, "of the task")
    until_gone(first)


def test_the_agent_of_a_job_that_fails_does_not_wait() -> None:
    first = run(places)[0][0]

    def fail() -> None:
        raise LookupError("no such column")

    with pytest.raises(WorkerError, match="no such column"):
        run(fail)
    until_gone(first)
    assert run(places)[0][0] != first


def test_what_an_earlier_driver_says_late_does_not_reach_the_next_job() -> None:
    first = run(places)[0][0]
    (waiting,) = kept_agents._kept
    assert waiting.process.stdin is not None
    waiting.process.stdin.write(b"beat\nsignal 15\nbea")
    assert run(places)[0][0] == first


def test_an_agent_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_agents, "IDLE_NS", 10**8)
    first = run(places)[0][0]
    ended = os.pidfd_open(first)
    assert select.select([ended], [], [], PATIENCE_S)[0]
    os.close(ended)
    assert run(places)[0][0] != first


_PROGRAM = """
import sys
sys.path[:0] = [{root!r}]
from tests.unit.launch.driver.test_kept_agents import places, run
print(run(places)[0][0], flush=True)
input()
"""


def test_agents_end_with_the_process_of_their_tasks() -> None:
    program = _PROGRAM.format(root=str(Path(__file__).parents[4]))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        assert Path(f"/proc/{agent}").exists()
        os.kill(process.pid, signal.SIGKILL)
    until_gone(agent)
