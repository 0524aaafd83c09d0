"""`run_task` in a real process with a real agent: what becomes of one when the other is killed, and who notices."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.conformance.cluster_kinds import agents

from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.clusters.local import PROGRAM
from ronde.launch.driver.driver_messages import HELLO
from ronde.launch.driver.task_server import TaskServer, TaskStreams
from ronde.net.authentication import Protection

SECOND = 10**9
PATIENCE_S = 60  # against hanging only


@contextmanager
def running_task() -> Iterator[tuple[subprocess.Popen[bytes], TaskStreams]]:
    """Yield a task whose agent has greeted the driver, and the driver's end of the agent's streams."""
    key = JobKey.generate()
    server = TaskServer(["127.0.0.1"], key, silence_ns=PATIENCE_S * SECOND)
    ticket = Ticket(0, (server.address,), bytes.fromhex(key.hex()), Protection.SEALED, PATIENCE_S * SECOND)
    with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as task:
        assert task.stdin is not None
        task.stdin.write(pickle.dumps(ticket))
        task.stdin.close()
        assert select.select([server], [], [], PATIENCE_S)[0]
        streams = server.accept()[0].accept()
        assert select.select([streams.stdout], [], [], PATIENCE_S)[0]
        assert streams.stdout.read(len(HELLO)) == HELLO
        try:
            yield task, streams
        finally:
            task.kill()
            streams.close()
            server.close()


def wait_until_over(streams: TaskStreams) -> None:
    assert select.select([streams.exited_fd], [], [], PATIENCE_S)[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_task_takes_its_agent_along_and_the_driver_notices(signum: int) -> None:
    with running_task() as (task, streams):
        (agent,) = agents()
        ended = os.pidfd_open(agent)
        os.kill(task.pid, signum)
        wait_until_over(streams)
        assert streams.exit_code() is None
        assert streams.loss
        assert select.select([ended], [], [], PATIENCE_S)[0], "the agent still runs"
        os.close(ended)


def test_a_killed_agent_ends_its_task_normally_and_the_driver_knows_the_signal() -> None:
    with running_task() as (task, streams):
        (agent,) = agents()
        os.kill(agent, signal.SIGKILL)
        wait_until_over(streams)
        assert streams.exit_code() == -signal.SIGKILL
        assert task.wait(PATIENCE_S) == 0


def test_a_task_that_the_driver_kills_kills_its_agent() -> None:
    with running_task() as (task, streams):
        (agent,) = agents()
        ended = os.pidfd_open(agent)
        os.kill(agent, signal.SIGSTOP)  # it could not end of itself
        streams.kill()
        assert select.select([ended], [], [], PATIENCE_S)[0]
        os.close(ended)
        assert task.wait(PATIENCE_S) == 0
