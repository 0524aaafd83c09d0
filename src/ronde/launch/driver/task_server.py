"""The driver's end of the connections to the tasks of a cluster.

One thread serves all connections. It hands each task that has registered to the driver's thread, which accepts or
refuses it, and passes the streams of its agent through pipes, so that for the driver the agent is like a child process.
A slow reader holds up its own connection only: the thread reads from a socket while the pipe behind it takes
more, and from standard input while the socket does.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from ronde.errors import ProtocolError
from ronde.job_key import JobKey
from ronde.launch.driver.driver_messages import (
    HEARTBEATS,
    PURPOSE,
    REGISTRATION,
    Registration,
    TaskMessage,
    split_message,
)
from ronde.launch.driver.job_store import first_that_listens
from ronde.net.addresses import Address, listen
from ronde.net.authenticating_listener import Authenticator
from ronde.net.authentication import Handshake, Role, protection_of
from ronde.net.message_channel import MessageChannel
from ronde.stores.server import detect_loss

__all__ = ["TaskConnection", "TaskServer", "TaskStreams"]

MAX_TASKS = 20_000
READ_BYTES = 64 * 1024
UNSENT_BYTES = 1 << 20  # with more on the way to a task, the thread reads no more of its standard input
REGISTER_NS = 10 * 10**9  # for the first message of an authenticated task

_log = logging.getLogger(__name__)


class TaskServer:
    """Listens for the tasks of one job at the first of `addresses` that this machine has; `port`: 0 for any.

    `fileno()` becomes readable when tasks have registered; then call `accept`. `silence_ns`: after how long a silence a
    task counts as lost. `is_secret`: encrypt the connections. Raises UsageError if this machine has none of the
    addresses.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: JobKey,
        silence_ns: int,
        is_secret: bool = False,
        port: int = 0,
    ) -> None:
        self._key, self._silence_ns, self._is_secret = key, silence_ns, is_secret
        self._listener, address = first_that_listens(
            addresses, lambda host: listen(Address(host=host, port=port))
        )
        self.address = str(address)
        self._epoll = select.epoll()
        self._authenticator = Authenticator(
            *([self._listener], f"the driver at {self.address}", self._greet, self._report, self._epoll)
        )
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._registered = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arrived: deque[TaskConnection] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # from the driver's thread
        self._tasks: dict[int, _Task] = {}  # by each of its descriptors
        self._count = 0
        self._is_closed = False
        self._next_look_ns = 0
        self._thread = threading.Thread(target=self._serve, name="ronde-tasks", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._registered

    def accept(self) -> list[TaskConnection]:
        """Return the tasks that have registered since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._registered)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """Close all connections, which ends all agents. A second call does nothing."""
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join()
            for fd in (self._wake, self._registered):
                os.close(fd)

    # For the connections

    def call(self, function: Callable[[], None]) -> None:
        """Call the function in the server's thread."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def watch(self, fd: int, task: _Task | None, events: int = select.EPOLLIN) -> None:
        """Serve the descriptor for the task from now on; None: no more."""
        known = fd in self._tasks
        if task is None:
            if known:
                del self._tasks[fd]
                self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, events)
        else:
            self._tasks[fd] = task
            self._epoll.register(fd, events)

    def announce(self, connection: TaskConnection) -> None:
        """Hand a registered task to the driver's thread."""
        self._arrived.append(connection)
        os.eventfd_write(self._registered, 1)

    def next_id(self) -> int:
        """Return a number that no other connection has."""
        self._count += 1
        return self._count

    # The thread

    def _serve(self) -> None:
        while not self._is_closed:
            for fd, events in self._epoll.poll(self._timeout_s()):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd in self._authenticator:
                    self._handle_stranger(fd)
                elif task := self._tasks.get(fd):
                    task.serve(fd, events)
            while self._calls:
                self._calls.popleft()()
            now_ns = time.monotonic_ns()
            self._authenticator.tick(now_ns)
            if now_ns >= self._next_look_ns:
                self._next_look_ns = now_ns + self._silence_ns // HEARTBEATS
                for task in set(self._tasks.values()):
                    task.beat(now_ns, self._silence_ns)

    def _timeout_s(self) -> float:
        wakes = [self._next_look_ns, self._authenticator.wake_ns]
        return max(0, min(at for at in wakes if at is not None) - time.monotonic_ns()) / 1e9

    def _handle_stranger(self, fd: int) -> None:
        connection = self._authenticator.handle_ready(fd)
        if connection is None:
            return
        sock, keys = connection.sock, connection.handshake.keys
        self._epoll.unregister(sock.fileno())
        if keys is None or len(self._tasks) >= MAX_TASKS:
            sock.close()
            return
        with suppress(OSError):
            detect_loss(sock)
        address = str(sock.getsockname()[0]).removeprefix("::ffff:")
        task = _Task(self, MessageChannel(sock, keys), address)
        self.watch(sock.fileno(), task)

    def _greet(self, sock: socket.socket) -> Handshake:
        return Handshake(Role.SERVER, self._key, PURPOSE, protection_of(sock, self._is_secret))

    def _report(self, error: OSError) -> None:
        _log.warning("the driver at %s cannot accept tasks now: %s", self.address, error.strerror)

    def _stop(self) -> None:
        self._is_closed = True
        for task in set(self._tasks.values()):
            task.lose("the driver has ended")
        self._authenticator.close()
        self._listener.close()
        self._epoll.close()


class _Task:
    """One connection, in the server's thread."""

    def __init__(self, server: TaskServer, channel: MessageChannel, address: str) -> None:
        self._server, self._channel, self._address = server, channel, address
        self._heard_ns = time.monotonic_ns()
        self._registration: Registration | None = None
        self._streams: TaskStreams | None = None
        self._stdin = -1  # the reading end of the driver's pipe
        self._pipes = {TaskMessage.STDOUT: -1, TaskMessage.STDERR: -1}  # the writing ends
        self._unwritten: dict[TaskMessage, bytearray] = {
            TaskMessage.STDOUT: bytearray(),
            TaskMessage.STDERR: bytearray(),
        }
        self._ends_after_output = False

    # Called by the driver, in the server's thread

    def accept(self, streams: TaskStreams, stdin: int, stdout: int, stderr: int) -> None:
        """Let the task start its agent. The descriptors are this end's of the agent's streams."""
        self._streams, self._stdin = streams, stdin
        self._pipes = {TaskMessage.STDOUT: stdout, TaskMessage.STDERR: stderr}
        if self._channel.fileno() < 0:  # lost meanwhile
            self._end_streams()
            return
        self._send(TaskMessage.ACCEPT)
        self._balance()

    def refuse(self, reason: str) -> None:
        """Let the task end."""
        self._send(TaskMessage.REFUSE, reason.encode())
        self.lose(reason)

    def kill(self) -> None:
        """Let the task kill its agent, and hang up."""
        self._send(TaskMessage.KILL)
        self.lose("")

    # Called by the server

    def serve(self, fd: int, events: int) -> None:
        """Serve a ready descriptor."""
        try:
            if fd == self._channel.fileno():
                if events & select.EPOLLOUT:
                    self._channel.flush()
                if events & ~select.EPOLLOUT:
                    self._receive()
            elif fd == self._stdin:
                self._read_stdin()
            else:
                self._write_output()
            self._balance()
        except (OSError, ProtocolError) as error:
            self.lose(str(error))

    def beat(self, now_ns: int, silence_ns: int) -> None:
        """Send a heartbeat, and look for those of the task."""
        limit_ns = silence_ns if self._registration else REGISTER_NS
        if self._is_held_up():
            self._heard_ns = now_ns  # its heartbeats wait unread
        elif now_ns - self._heard_ns > limit_ns:
            self.lose(f"no heartbeat for {limit_ns / 1e9:g} s")
        elif self._channel.unsent == 0:
            self._send(TaskMessage.HEARTBEAT)

    def lose(self, reason: str) -> None:
        """Close the connection. Output that has arrived still reaches the driver."""
        fd = self._channel.fileno()
        if fd >= 0:
            self._server.watch(fd, None)
            self._channel.close()
            if self._streams:
                self._streams.note_loss(reason)
        if self._streams:
            self._ends_after_output = True
            with suppress(OSError):
                self._write_output()

    def _send(self, kind: TaskMessage, data: bytes = b"") -> None:
        if self._channel.fileno() >= 0:
            try:
                self._channel.send(kind.value + data)
            except OSError as error:
                self.lose(str(error))

    def _receive(self) -> None:
        for message in self._channel.receive():
            self._heard_ns = time.monotonic_ns()
            self._take(*split_message(message))

    def _take(self, kind: TaskMessage, data: bytes) -> None:
        if kind is TaskMessage.HEARTBEAT:
            return
        if self._registration is None:
            if kind is not TaskMessage.REGISTER:
                raise ProtocolError("the first message of a task is not its registration")
            self._registration = REGISTRATION.decode(data)
            self._server.announce(TaskConnection(self._server, self, self._registration, self._address))
        elif self._streams is None:
            raise ProtocolError("a task sends output before it is accepted")
        elif kind in self._unwritten:
            self._unwritten[kind] += data
            self._write_output()
        elif kind is TaskMessage.EXIT and data.removeprefix(b"-").isdigit() and len(data) < 8:
            self._streams.note_exit(int(data))
            self.lose("")
        else:
            raise ProtocolError(f"a task sends {kind.name.lower()}, which only a driver says")

    def _read_stdin(self) -> None:
        data = os.read(self._stdin, READ_BYTES)
        if data:
            self._send(TaskMessage.STDIN, data)
            return
        self._send(TaskMessage.END_OF_STDIN)
        self._server.watch(self._stdin, None)
        os.close(self._stdin)
        self._stdin = -1

    def _write_output(self) -> None:
        for kind, buffer in self._unwritten.items():
            while buffer and self._pipes[kind] >= 0:
                try:
                    del buffer[: os.write(self._pipes[kind], buffer[:READ_BYTES])]
                except BlockingIOError:
                    break
                except BrokenPipeError:  # the driver reads no more
                    buffer.clear()
            if self._pipes[kind] >= 0:
                self._server.watch(self._pipes[kind], self if buffer else None, select.EPOLLOUT)
        if self._ends_after_output and not any(self._unwritten.values()):
            self._end_streams()

    def _end_streams(self) -> None:
        for fd in (*self._pipes.values(), self._stdin):
            if fd >= 0:
                self._server.watch(fd, None)
                os.close(fd)
        self._pipes, self._stdin = dict.fromkeys(self._pipes, -1), -1
        streams, self._streams = self._streams, None
        if streams:
            streams.note_end()

    def _is_held_up(self) -> bool:
        return any(len(buffer) >= READ_BYTES for buffer in self._unwritten.values())

    def _balance(self) -> None:
        """Read only what can be passed on."""
        fd = self._channel.fileno()
        if fd < 0:
            return
        reads = 0 if self._is_held_up() else select.EPOLLIN
        writes = select.EPOLLOUT if self._channel.unsent else 0
        self._server.watch(fd, self, reads | writes)
        if self._stdin >= 0:
            self._server.watch(self._stdin, self if self._channel.unsent < UNSENT_BYTES else None)


class TaskConnection:
    """A task that has registered, for the driver's thread. Call either `accept` or `refuse`, once.

    `address`: that of this machine which the task has reached.
    """

    def __init__(self, server: TaskServer, task: _Task, registration: Registration, address: str) -> None:
        self.id = server.next_id()
        self.registration, self.address = registration, address
        self._server, self._task = server, task

    def accept(self) -> TaskStreams:
        """Let the task start its agent; return the agent's streams."""
        return TaskStreams(self._server, self._task, f"its task on {self.registration.host}")

    def refuse(self, reason: str) -> None:
        """Let the task end, with the reason."""
        task = self._task
        self._server.call(lambda: task.refuse(reason))


class TaskStreams:
    """The streams of a task's agent, as `AgentStreams` describes them."""

    def __init__(self, server: TaskServer, task: _Task, way: str) -> None:
        self._server, self._task, self.way = server, task, way
        self.loss = ""  # why the connection broke
        self._code: int | None = None
        self._is_closed, self._lock = False, threading.Lock()
        self.exited_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        stdin, self.stdin_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stdout, stdout_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stderr, stderr_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(stderr, "rb", buffering=0)
        server.call(lambda: task.accept(self, stdin, stdout_end, stderr_end))

    def close_stdin(self) -> None:
        """Close standard input."""
        if self.stdin_fd >= 0:
            os.close(self.stdin_fd)
            self.stdin_fd = -1

    def exit_code(self) -> int | None:
        """Return the exit code; None if the connection broke before it came."""
        return self._code

    def kill(self) -> None:
        """Let the task kill its agent."""
        self._server.call(self._task.kill)

    def close(self) -> None:
        """Close the descriptors."""
        self.close_stdin()
        self.stdout.close()
        self.stderr.close()
        with self._lock:
            self._is_closed = True
            os.close(self.exited_fd)

    # In the server's thread

    def note_exit(self, code: int) -> None:
        """Note the agent's exit code."""
        self._code = code

    def note_loss(self, reason: str) -> None:
        """Note that the connection has ended."""
        self.loss = self.loss or reason

    def note_end(self) -> None:
        """Note that all output is in the pipes."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self.exited_fd, 1)
