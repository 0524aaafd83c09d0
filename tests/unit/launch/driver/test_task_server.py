"""The connections of tasks: who may register, and that no task harms another one or the driver.

The tasks here are sockets of this process; `tests/conformance/test_clusters.py` has real ones.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import pytest

from ronde.errors import RondeError, TimeoutError
from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.driver.driver_messages import PURPOSE, REGISTRATION, Registration, TaskMessage
from ronde.launch.driver.task import run_task
from ronde.launch.driver.task_server import TaskConnection, TaskServer, TaskStreams
from ronde.net.authentication import Protection, Role, authenticate
from ronde.net.message_channel import MessageChannel

SECOND = 10**9
PATIENCE_S = 60  # against hanging only


@pytest.fixture
def key() -> JobKey:
    return JobKey.generate()


@pytest.fixture
def server(key: JobKey) -> Iterator[TaskServer]:
    server = TaskServer(["127.0.0.1"], key, silence_ns=30 * SECOND)
    yield server
    server.close()


class HasAddress(Protocol):
    """What listens for tasks at an address."""

    address: str


class FakeTask:
    """A connection that has proved that it knows the key."""

    def __init__(self, server: HasAddress, key: JobKey, slot: int = 0, *, registers: bool = True) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port_of(server)))
        deadline_ns = time.monotonic_ns() + PATIENCE_S * SECOND
        handshake = authenticate(self.sock, Role.CLIENT, key, PURPOSE, Protection.SEALED, deadline_ns)
        assert handshake.keys
        self.channel = MessageChannel(self.sock, handshake.keys)
        if registers:
            self.say(TaskMessage.REGISTER, REGISTRATION.encode(Registration(slot, 0, "a", "a's")))

    def say(self, kind: TaskMessage, data: bytes = b"") -> None:
        self.channel.send(kind.value + data)

    def hear(self) -> tuple[TaskMessage, bytes]:
        """Return the next message that is no heartbeat. Raises ConnectionResetError at the end."""
        while True:
            assert select.select([self.sock], [], [], PATIENCE_S)[0]
            for message in self.channel.receive():
                if TaskMessage(message[:1]) is not TaskMessage.HEARTBEAT:
                    return TaskMessage(message[:1]), message[1:]

    def is_closed(self) -> bool:
        try:
            self.hear()
        except ConnectionResetError:
            self.sock.close()
            return True
        return False


def port_of(server: HasAddress) -> int:
    return int(server.address.rpartition(":")[2])


def registered(server: TaskServer, count: int = 1) -> list[TaskConnection]:
    found: list[TaskConnection] = []
    while len(found) < count:
        assert select.select([server], [], [], PATIENCE_S)[0], f"only {len(found)} tasks have registered"
        found += server.accept()
    return found


def wait_until_over(streams: TaskStreams) -> None:
    assert select.select([streams.exited_fd], [], [], PATIENCE_S)[0]


def read(fd: int) -> bytes:
    assert select.select([fd], [], [], PATIENCE_S)[0]
    return os.read(fd, 1 << 16)


def test_the_streams_of_an_agent_pass_in_both_directions(server: TaskServer, key: JobKey) -> None:
    task = FakeTask(server, key, slot=3)
    (connection,) = registered(server)
    assert connection.registration.slot == 3
    streams = connection.accept()
    assert task.hear() == (TaskMessage.ACCEPT, b"")
    os.write(streams.stdin_fd, b"hello\n")
    assert task.hear() == (TaskMessage.STDIN, b"hello\n")
    task.say(TaskMessage.STDOUT, b"out")
    task.say(TaskMessage.STDERR, b"err")
    assert read(streams.stdout.fileno()) == b"out"
    assert read(streams.stderr.fileno()) == b"err"
    streams.close_stdin()
    assert task.hear() == (TaskMessage.END_OF_STDIN, b"")
    task.say(TaskMessage.STDOUT, b"last")
    task.say(TaskMessage.EXIT, b"-9")
    wait_until_over(streams)
    assert streams.exit_code() == -9
    assert read(streams.stdout.fileno()) == b"last"
    streams.close()
    assert task.is_closed()


def test_a_lost_task_has_no_exit_code(server: TaskServer, key: JobKey) -> None:
    task = FakeTask(server, key)
    streams = registered(server)[0].accept()
    assert task.hear()[0] is TaskMessage.ACCEPT
    task.sock.close()
    wait_until_over(streams)
    assert streams.exit_code() is None
    streams.close()


def test_a_silent_task_is_lost(key: JobKey) -> None:
    server = TaskServer(["127.0.0.1"], key, silence_ns=SECOND // 5)
    try:
        task = FakeTask(server, key)
        streams = registered(server)[0].accept()
        wait_until_over(streams)
        assert streams.exit_code() is None
        assert "no heartbeat" in streams.loss
        streams.close()
        task.sock.close()
    finally:
        server.close()


def test_output_that_the_driver_does_not_read_holds_up_its_own_task_only(
    server: TaskServer, key: JobKey
) -> None:
    loud, other = FakeTask(server, key, 0), FakeTask(server, key, 1)
    by_slot = {each.registration.slot: each for each in registered(server, 2)}
    unread, streams = by_slot[0].accept(), by_slot[1].accept()
    assert loud.hear()[0] is other.hear()[0] is TaskMessage.ACCEPT
    sent = 0
    deadline = time.monotonic() + PATIENCE_S
    while loud.channel.unsent == 0:  # the pipe, the server's buffer and those of the sockets are full
        assert time.monotonic() < deadline
        loud.say(TaskMessage.STDOUT, bytes(1 << 16))
        sent += 1 << 16
        loud.channel.flush()
    other.say(TaskMessage.STDOUT, b"still heard")
    assert read(streams.stdout.fileno()) == b"still heard"
    got = 0
    while got < sent:
        got += len(read(unread.stdout.fileno()))
        loud.channel.flush()
    for each, task in ((unread, loud), (streams, other)):
        each.kill()
        each.close()
        task.sock.close()


@pytest.mark.parametrize(
    "messages",
    [
        [b"?"],
        [b""],
        [TaskMessage.STDOUT.value + b"before its registration"],
        [TaskMessage.REGISTER.value + b"no registration"],
        [TaskMessage.REGISTER.value + pickle.dumps(print)],
    ],
    ids=["an unknown letter", "nothing", "output", "a wrong registration", "a pickle"],
)
def test_a_malformed_message_ends_its_connection_only(
    server: TaskServer, key: JobKey, messages: list[bytes]
) -> None:
    task = FakeTask(server, key, registers=False)
    for message in messages:
        task.channel.send(message)
    assert task.is_closed()
    good = FakeTask(server, key)
    registered(server)
    good.sock.close()


def test_a_task_that_speaks_as_the_driver_is_cut_off(server: TaskServer, key: JobKey) -> None:
    task = FakeTask(server, key)
    streams = registered(server)[0].accept()
    assert task.hear()[0] is TaskMessage.ACCEPT
    task.say(TaskMessage.KILL)
    wait_until_over(streams)
    streams.close()
    assert task.is_closed()


def test_recorded_bytes_of_a_task_register_nothing(server: TaskServer, key: JobKey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as relay:
        front = socket.create_connection(relay.getsockname())
        inside, _ = relay.accept()
    back = socket.create_connection(("127.0.0.1", port_of(server)))
    recorded = b""
    deadline_ns = time.monotonic_ns() + PATIENCE_S * SECOND

    def task() -> None:
        handshake = authenticate(front, Role.CLIENT, key, PURPOSE, Protection.SEALED, deadline_ns)
        assert handshake.keys
        channel = MessageChannel(front, handshake.keys)
        channel.send(TaskMessage.REGISTER.value + REGISTRATION.encode(Registration(0, 0, "a", "a's")))

    thread = threading.Thread(target=task)
    thread.start()
    with front, inside, back:
        while not select.select([server], [], [], 0)[0]:
            for source in select.select([inside, back], [], [], 0.05)[0]:
                data = source.recv(4096)
                recorded += data if source is inside else b""
                (back if source is inside else inside).sendall(data)
        thread.join()
        assert len(server.accept()) == 1
    with socket.create_connection(("127.0.0.1", port_of(server))) as again:
        again.sendall(recorded)
        again.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            while again.recv(4096):  # the server's proof, and then the end
                pass
    assert server.accept() == []


def test_two_hundred_tasks_register(server: TaskServer, key: JobKey) -> None:
    tasks = [FakeTask(server, key, slot) for slot in range(200)]
    assert {each.registration.slot for each in registered(server, 200)} == set(range(200))
    for task in tasks:
        task.sock.close()


def test_strangers_hold_up_no_task(server: TaskServer, key: JobKey) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(300)]
    task = FakeTask(server, key)
    registered(server)
    for sock in (*strangers, task.sock):
        sock.close()


def ticket(server: TaskServer, key: bytes, timeout_ns: int = 30 * SECOND) -> Ticket:
    return Ticket(0, (server.address,), key, Protection.SEALED, timeout_ns)


def test_a_task_with_another_key_is_told_so(server: TaskServer) -> None:
    with pytest.raises(TimeoutError, match="job key"):
        run_task(ticket(server, bytes(32), timeout_ns=SECOND))


def test_a_refused_task_says_why(server: TaskServer, key: JobKey) -> None:
    refuser = threading.Thread(target=lambda: registered(server)[0].refuse("another attempt runs"))
    refuser.start()
    with pytest.raises(RondeError, match="the driver refuses this task: another attempt runs"):
        run_task(ticket(server, bytes.fromhex(key.hex())))
    refuser.join()
