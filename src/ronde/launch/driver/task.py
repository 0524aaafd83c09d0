"""What runs in a task of a cluster: connects to the driver, starts an agent as a child, and relays its streams.

The task stays connected until the agent has ended. The agent's standard input ends with the connection, and with this
process, and then the agent ends its workers. Everything happens in the calling thread, without signal handlers and
without a change of this process.
"""

from __future__ import annotations

import builtins
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from ronde.environment import environment
from ronde.errors import PeerLostError, ProtocolError, RondeError, TimeoutError
from ronde.job_key import JobKey
from ronde.launch.clusters.cluster import Ticket
from ronde.launch.driver.driver_messages import (
    KEY_LINE,
    PURPOSE,
    REGISTRATION,
    Registration,
    TaskMessage,
    agent_command,
    split_message,
)
from ronde.net.addresses import Endpoint, parse_address, resolve
from ronde.net.authentication import Role, authenticate
from ronde.net.host import host_identity, host_name
from ronde.net.message_channel import MessageChannel
from ronde.stores.server import detect_loss

__all__ = ["run_task"]

TRY_NS = 2 * 10**9  # per address
PAUSE_S = 0.2  # after a try of all addresses
HEARTBEAT_NS = 10**9
SILENCE_NS = 60 * 10**9  # of a driver, after which a task gives up; far longer than the driver's own limit
LAST_OUTPUT_NS = 10 * 10**9  # how long the driver may take to read the rest
END_NS = 120 * 10**9  # how long an agent may take to end its workers after the driver is gone
READ_BYTES = 64 * 1024
CANNOT_EXECUTE = 126
UNSENT_BYTES = 1 << 20  # with more on the way to the driver, the task reads no more output

_Agent = subprocess.Popen[bytes]


def run_task(
    ticket: Ticket,
    attempt: int = 0,
    gpus: Sequence[str] | None = None,
    module_path: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run the agent of a slot, and return when it has ended, or the driver has ended it.

    Any thread may call this, several at once. The agent and its workers inherit the environment of this process.

    Args:
        ticket: What the driver gave the cluster for this slot.
        attempt: The number of this attempt to run the slot's task, from 0; higher ones replace lower ones.
        gpus: The names of the GPUs that the platform has given the task; None: those in CUDA_VISIBLE_DEVICES.
        module_path: Where the agent and its workers find modules, unless the ticket names their Python; None:
            `sys.path`, to which the platform may have added files of the job.
        variables: Further environment variables of the agent and its workers.

    Raises:
        TimeoutError: The driver could not be reached within the ticket's start timeout.
        PeerLostError: The connection to the driver broke.
        RondeError: The driver refused this task, for example because another attempt runs, or the agent could not be
            started.
    """
    with _connect(ticket) as channel:
        registration = Registration(
            slot=ticket.slot,
            attempt=attempt,
            host=host_name(),
            host_id=host_identity(environment().get("RONDE_HOST_ID", "")),
            gpus=_visible_gpus() if gpus is None else tuple(gpus),
        )
        channel.send(TaskMessage.REGISTER.value + REGISTRATION.encode(registration))
        start = partial(
            _start_agent, ticket, sys.path if module_path is None else module_path, variables or {}
        )
        _Relay(channel, ticket.job_key, start).run()


class _Relay:
    """One agent and the connection to the driver."""

    def __init__(self, channel: MessageChannel, job_key: bytes, start: Callable[[], _Agent]) -> None:
        self._channel, self._job_key, self._start = channel, job_key, start
        self._heard_ns = self._spoke_ns = time.monotonic_ns()
        self._agent: _Agent | None = None
        self._unwritten = b""  # for the agent's standard input
        self._ends_stdin = False
        self._is_killed = False

    def run(self) -> None:
        """Serve until the agent has ended."""
        try:
            while self._agent is None:
                self._turn(())
                if self._is_killed:
                    return
            self._follow_agent(self._agent)
        except (OSError, ProtocolError) as error:
            if not self._is_killed:
                raise PeerLostError(f"the connection to the driver broke: {error}") from None
        finally:
            self._end_agent()

    def _follow_agent(self, agent: _Agent) -> None:
        assert agent.stdout is not None
        assert agent.stderr is not None
        outputs = {
            agent.stdout.fileno(): TaskMessage.STDOUT,
            agent.stderr.fileno(): TaskMessage.STDERR,
        }
        exited = os.pidfd_open(agent.pid)
        try:
            while not self._is_killed:
                reads = [exited, *outputs] if self._channel.unsent < UNSENT_BYTES else []
                ready = self._turn(reads)
                for fd in [fd for fd in outputs if fd in ready]:
                    self._pass_on(fd, outputs)
                if exited in ready:
                    break
            else:
                return
        finally:
            os.close(exited)
        while outputs and self._has_output(outputs):  # other processes may hold the pipes open
            for fd in list(outputs):
                self._pass_on(fd, outputs)
        self._send(TaskMessage.EXIT, str(agent.wait()).encode())
        self._flush()

    def _turn(self, reads: list[int] | tuple[int, ...]) -> set[int]:
        """Wait for the connection, the agent and its output; return the ready ones among `reads`."""
        poll = select.poll()
        for fd in reads:
            poll.register(fd, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))
        stdin = self._agent.stdin if self._agent else None
        if self._unwritten and stdin:
            poll.register(stdin.fileno(), select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(HEARTBEAT_NS / 1e6)}
        self._channel.flush()
        if self._channel.fileno() in ready:
            self._receive()
        self._write_stdin()
        self._beat()
        return ready

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._heard_ns > SILENCE_NS:
            raise ProtocolError(f"no heartbeat for {SILENCE_NS / 1e9:g} s")
        if now_ns - self._spoke_ns > HEARTBEAT_NS and not self._channel.unsent:
            self._send(TaskMessage.HEARTBEAT)

    def _send(self, kind: TaskMessage, data: bytes = b"") -> None:
        self._spoke_ns = time.monotonic_ns()
        self._channel.send(kind.value + data)

    def _receive(self) -> None:
        for message in self._channel.receive():
            self._heard_ns = time.monotonic_ns()
            kind, data = split_message(message)
            match kind:
                case TaskMessage.HEARTBEAT:
                    pass
                case TaskMessage.ACCEPT if self._agent is None:
                    self._agent = self._start_agent()
                    self._unwritten = KEY_LINE + self._job_key.hex().encode() + b"\n"
                case TaskMessage.REFUSE if self._agent is None:
                    raise RondeError(f"the driver refuses this task: {data.decode(errors='replace')}")
                case TaskMessage.STDIN:
                    self._unwritten += data
                case TaskMessage.END_OF_STDIN:
                    self._ends_stdin = True
                case TaskMessage.KILL:
                    self._is_killed = True
                case _:
                    raise ProtocolError(f"the driver sends {kind.name.lower()} at the wrong time")

    def _start_agent(self) -> _Agent:
        """Start the agent. Report to the driver if that fails, as the shell of an ssh would."""
        try:
            return self._start()
        except OSError as error:
            self._send(TaskMessage.STDERR, f"{error.strerror}: {error.filename}".encode(errors="replace"))
            self._send(TaskMessage.EXIT, b"%d" % CANNOT_EXECUTE)
            self._flush()
            raise RondeError(f"the agent cannot be started: {error}") from None

    def _write_stdin(self) -> None:
        stdin = self._agent.stdin if self._agent else None
        if stdin is None or stdin.closed:
            return
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(stdin.fileno(), self._unwritten) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the agent is about to end
            self._unwritten, self._ends_stdin = b"", True
        if self._ends_stdin:
            stdin.close()

    def _pass_on(self, fd: int, outputs: dict[int, TaskMessage]) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._send(outputs[fd], data)
        else:
            del outputs[fd]

    @staticmethod
    def _has_output(outputs: dict[int, TaskMessage]) -> bool:
        return bool(select.select(list(outputs), [], [], 0)[0])

    def _flush(self) -> None:
        """Let the driver read the rest."""
        deadline_ns = time.monotonic_ns() + LAST_OUTPUT_NS
        while self._channel.unsent and time.monotonic_ns() < deadline_ns:
            select.select([], [self._channel.fileno()], [], PAUSE_S)
            self._channel.flush()

    def _end_agent(self) -> None:
        """Let an agent that still runs end its workers, because its input ends; kill it if it does not, or at once."""
        agent = self._agent
        if agent is None:
            return
        for pipe in (agent.stdin, agent.stdout, agent.stderr):
            assert pipe is not None
            pipe.close()
        if not self._is_killed:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(END_NS / 1e9)
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _start_agent(ticket: Ticket, module_path: Sequence[str], further: Mapping[str, str]) -> _Agent:
    """Start an agent with pipes to this process. Raises OSError."""
    variables = {**environment(), **further}
    command = agent_command()
    if ticket.python is None:
        standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
        variables["PYTHONPATH"] = os.pathsep.join(
            path for path in module_path if path and path not in standard
        )
    else:
        command[0] = ticket.python
    agent = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    for pipe in (agent.stdin, agent.stdout, agent.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return agent


def _visible_gpus() -> tuple[str, ...]:
    names = environment().get("CUDA_VISIBLE_DEVICES", "")
    return tuple(name.strip() for name in names.split(",") if name.strip())


# The connection


@contextmanager
def _connect(ticket: Ticket) -> Iterator[MessageChannel]:
    """Connect to the first address of the driver that answers and knows the job's key."""
    key = JobKey.from_hex(ticket.job_key.hex())
    deadline_ns = time.monotonic_ns() + ticket.start_timeout_ns
    reasons: dict[str, str] = {}
    while True:
        for address in ticket.addresses:
            try:
                channel = _try_address(address, key, ticket, deadline_ns)
            except builtins.TimeoutError as error:
                reasons.setdefault(address, f"{address}: {error}")  # an earlier reason says more
                continue
            except (OSError, ProtocolError) as error:
                reasons[address] = f"{address}: {error}"
                continue
            try:
                yield channel
            finally:
                channel.close()
            return
        if time.monotonic_ns() >= deadline_ns:
            raise TimeoutError(
                "cannot reach the driver; name the network interface that leads to it: "
                + "; ".join(reasons.values()),
                operation="start",
                waited_ns=ticket.start_timeout_ns,
            )
        time.sleep(PAUSE_S)


def _try_address(address: str, key: JobKey, ticket: Ticket, deadline_ns: int) -> MessageChannel:
    end_ns = min(deadline_ns, time.monotonic_ns() + TRY_NS)
    sock = _open(resolve(parse_address(address), TRY_NS)[0], end_ns)
    try:
        handshake = authenticate(sock, Role.CLIENT, key, PURPOSE, ticket.protection, end_ns)
        if handshake.keys is None:
            raise ProtocolError("the driver protects no messages")
        detect_loss(sock)
        return MessageChannel(sock, handshake.keys)
    except BaseException:
        sock.close()
        raise


def _open(endpoint: Endpoint, end_ns: int) -> socket.socket:
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, (end_ns - time.monotonic_ns()) / 1e9))
        sock.connect(endpoint.sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock
