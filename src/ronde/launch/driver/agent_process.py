"""One agent, as its driver sees it: its streams, greeting, assignment, output and end.

    REQUESTED --streams--> STARTING --its hello--> GREETED --its assignment--> RUNNING
    ... in any of them --the agent, or the ssh or task that leads to it, ends--> ENDED

An agent is a child process of the driver (the agent itself, or an ssh), or the child of a cluster's task, which relays
its streams. Until the greeting, the driver does not show standard output, because login scripts may print anything. It
keeps standard error, which explains why an agent did not start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import IO, Protocol

from ronde.launch.driver.driver_messages import HELLO, Assignment, DaemonOrder, hello
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import LineSplitter, OutputStream, Piece, Screen, Sink, Source, Tail

__all__ = ["AgentPhase", "AgentProcess", "AgentStreams", "ChildStreams", "EchoFilter"]

MOST_UNREAD = 1 << 20  # an agent with more unread input does not read any
READ_BYTES = 64 * 1024
ECHO_NS = 10 * 10**9
LEAVE_NS = 20 * 10**9  # for an agent that ends its workers and leaves
SSH = "ssh"
SSH_FAILED, NOT_FOUND = 255, 127
LAST_WAIT_S = 5  # how long a killed process may take to end


class AgentStreams(Protocol):
    """The streams of an agent. All descriptors are non-blocking.

    `stdin_fd`: for writing; -1 once it is closed. `exited_fd`: becomes readable when the agent has ended and its output
    is complete. `way`: the connection to the agent, which may break, such as "ssh"; empty for a child of the driver.
    """

    stdin_fd: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    exited_fd: int
    way: str

    def close_stdin(self) -> None:
        """Close standard input: the agent ends its workers and leaves. A second call does nothing."""

    def exit_code(self) -> int | None:
        """Return the exit code once `exited_fd` is readable; None if the way to the agent broke before it came."""

    def kill(self) -> None:
        """Kill the agent, or the ssh or task that leads to it; the agent then notices that its input has ended."""

    def close(self) -> None:
        """Close all descriptors, after a kill if the agent still runs. Unwatch them before."""


class ChildStreams:
    """A child process of the driver: the agent, or the ssh that leads to it.

    Raises OSError if the process cannot start.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], way: str = "") -> None:
        self.way = way
        self._popen = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the driver gets Ctrl-C and passes it on
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdin, self.stdout, self.stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self.stdin_fd = self._stdin.fileno()
        for pipe in (self._stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        try:
            self.exited_fd = os.pidfd_open(self._popen.pid)
        except OSError:
            self.kill()
            with self._popen:  # closes the pipes and waits
                raise

    def close_stdin(self) -> None:
        """Close standard input."""
        self.stdin_fd = -1
        self._stdin.close()

    def exit_code(self) -> int | None:
        """Return the exit code of the process."""
        return self._popen.wait()

    def kill(self) -> None:
        """Kill the process and those of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, and wait a moment for the process."""
        os.close(self.exited_fd)
        for pipe in (self._stdin, self.stdout, self.stderr):
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hung mount may hold even a killed process
            self._popen.wait(timeout=LAST_WAIT_S)


class EchoFilter:
    """Shows a message that several agents print at the same time once; workers' lines are not its concern."""

    def __init__(self) -> None:
        self._said: deque[tuple[int, str, bytes]] = deque(maxlen=100)

    def is_echo(self, agent: str, line: bytes) -> bool:
        """Return whether another agent has just printed this line, and remember it."""
        if not line.startswith(b"ronde: "):
            return False
        since_ns = time.monotonic_ns() - ECHO_NS
        others = [other for at_ns, other, said in self._said if said == line and at_ns >= since_ns]
        if others and agent not in others:
            return True
        self._said.append((time.monotonic_ns(), agent, line))
        return False


class _AgentErrors(OutputStream):
    """Standard error of an agent, without messages that another agent printed."""

    def __init__(self, pipe: IO[bytes], agent: str, echo_filter: EchoFilter, sink: Sink, tail: Tail) -> None:
        super().__init__(pipe, Source(0, f"stderr of {agent}", b""), sink, tail)
        self._agent, self._echo_filter = agent, echo_filter

    def _pass_on(self, pieces: list[Piece]) -> None:
        super()._pass_on(
            [piece for piece in pieces if not self._echo_filter.is_echo(self._agent, piece.text)]
        )


class AgentPhase(Enum):
    """How far an agent has come."""

    REQUESTED = auto()
    STARTING = auto()
    GREETED = auto()
    RUNNING = auto()
    ENDED = auto()


class AgentProcess:
    """An agent on the host `name`, or in the task of that name.

    `greeted` is called when the agent has said hello and waits for its assignment; `ended` when the agent, or the ssh
    or task that leads to it, has exited; `why` is then the problem, or empty.
    """

    def __init__(
        self,
        name: str,
        loop: Loop,
        screen: Screen,
        echo_filter: EchoFilter,
        greeted: Callable[[AgentProcess], None],
        ended: Callable[[AgentProcess], None],
    ) -> None:
        self.name, self.id = name, secrets.token_hex(8)
        self.phase = AgentPhase.REQUESTED
        self.why = ""
        self.exit_code: int | None = None  # of the agent that has ended; None: what led to it broke
        self._loop, self._screen, self._echo_filter = loop, screen, echo_filter
        self._greeted, self._ended = greeted, ended
        self._streams: AgentStreams | None = None
        self._unwritten = b""  # an ordinary user's pipes may hold as little as 4 KiB
        self._leaving = False  # its input ends once everything is written
        self._greeting = b""
        self._errors, self._splitter = Tail(), LineSplitter()
        self._output: set[OutputStream] = set()

    def attach_streams(self, streams: AgentStreams) -> None:
        """Begin to read from the agent, which has been started."""
        assert self.phase is AgentPhase.REQUESTED
        self.phase, self._streams = AgentPhase.STARTING, streams
        self._loop.watch(streams.exited_fd, Order.EXITS, self._exited)
        self._loop.watch(streams.stdout.fileno(), Order.OUTPUT, self._read_greeting)
        self._loop.watch(streams.stderr.fileno(), Order.OUTPUT, self._read_errors)

    def assign(self, assignment: Assignment | DaemonOrder) -> None:
        """Give the agent its assignment, and show its output from now on."""
        assert self.phase is AgentPhase.GREETED
        streams = self._attached()
        self._read_errors()  # earlier lines are not shown
        self.phase = AgentPhase.RUNNING
        self._loop.unwatch(streams.stderr.fileno())
        self._write(assignment.encode())
        self._errors, self._splitter = Tail(), LineSplitter()
        self._output = {
            OutputStream(streams.stdout, Source(0, f"stdout of {self.name}", b""), self._screen.out),
            _AgentErrors(streams.stderr, self.name, self._echo_filter, self._screen.err, self._errors),
        }

    def send_signal(self, signum: int) -> None:
        """Pass on a signal to the agent; kill it if it has no assignment yet."""
        if self.phase is not AgentPhase.RUNNING:
            self.kill()
        elif not self._leaving:
            self._write(b"signal %d\n" % signum)

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the agent."""
        if self.phase is AgentPhase.RUNNING and not self._leaving:
            self._write(b"beat\n")

    def ask_to_leave(self) -> None:
        """Let the agent end its workers and leave; kill it if it has no assignment yet."""
        if self.phase is not AgentPhase.RUNNING:
            self.kill()
        elif not self._leaving:
            self._leaving = True
            self._write_on()

    def kill(self, why: str = "") -> None:
        """Kill the agent, or the ssh or task that leads to it; the agent then notices that its input has ended."""
        self.why = self.why or why
        if self._streams is not None:
            if self.phase is not AgentPhase.ENDED:
                self._streams.kill()
        elif self.phase is AgentPhase.REQUESTED:
            self.phase = AgentPhase.ENDED
            self._ended(self)

    def balance(self) -> None:
        """Read from the agent only while the driver's streams accept output. Call this before each turn."""
        for stream in self._output:
            pump = partial(self._pump, stream)
            self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Kill as `kill` does, and close everything."""
        if self._streams is not None and self.phase is not AgentPhase.ENDED:
            self._streams.kill()
            self._let_go()
        self.phase = AgentPhase.ENDED

    def _attached(self) -> AgentStreams:
        assert self._streams is not None
        return self._streams

    # Until the agent's greeting

    def _read_greeting(self) -> None:
        try:
            data = os.read(self._attached().stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._attached().stdout.fileno())
            return
        lines = (self._greeting + data).split(b"\n")
        self._greeting = lines.pop()[-READ_BYTES:]
        for line in lines:
            if line.startswith(HELLO):
                self._read_hello(line + b"\n")
                return

    def _read_hello(self, line: bytes) -> None:
        if line != hello():
            there, here = (text[len(HELLO) :].split()[0].decode() for text in (line, hello()))
            self.kill(f"it has Ronde {there}, and this machine {here}: install the same on both")
            return
        self.phase = AgentPhase.GREETED
        self._loop.unwatch(self._attached().stdout.fileno())
        self._greeted(self)

    def _read_errors(self) -> None:
        try:
            data = os.read(self._attached().stderr.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._attached().stderr.fileno())
        self._errors.add(self._splitter.feed(data) if data else self._splitter.finish())

    def _write(self, data: bytes) -> None:
        """Write the data, as much as the pipe takes now and the rest later."""
        if len(self._unwritten) > MOST_UNREAD:
            self.kill("it does not read its input")
        self._unwritten += data
        self._write_on()

    def _write_on(self) -> None:
        streams = self._attached()
        fd = streams.stdin_fd
        try:
            self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the agent is about to end, and may still print the reason
            self._unwritten, self._leaving = b"", True
            end = partial(self.kill, "it does not read its input")
            self._loop.set_timer(self, time.monotonic_ns() + LEAVE_NS, end)
        wanted = bool(self._unwritten)
        self._loop.watch(fd, Order.SINKS, self._write_on, wanted=wanted, events=selectors.EVENT_WRITE)
        if self._leaving and not wanted:
            streams.close_stdin()

    # The agent's end

    def _pump(self, stream: OutputStream) -> None:
        if stream.pump() is None:
            self._close_stream(stream)

    def _close_stream(self, stream: OutputStream) -> None:
        self._loop.unwatch(stream.fileno())
        self._output.remove(stream)
        stream.close()

    def _exited(self) -> None:
        streams = self._attached()
        if self.phase is not AgentPhase.RUNNING:
            self._read_errors()
            self._errors.add(self._splitter.finish())
        for stream in self._output:
            stream.drain()
        self.exit_code = streams.exit_code()
        self.why = self.why or self._reason(self.exit_code, streams.way)
        self._let_go()
        self._ended(self)

    def _let_go(self) -> None:
        streams = self._attached()
        if self.phase is not AgentPhase.RUNNING:
            self._loop.unwatch(streams.stdout.fileno())
            self._loop.unwatch(streams.stderr.fileno())
        self.phase = AgentPhase.ENDED
        self._loop.set_timer(self, None, self.kill)
        self._loop.unwatch(streams.stdin_fd)
        self._loop.unwatch(streams.exited_fd)
        for stream in list(self._output):
            self._close_stream(stream)
        streams.close()

    def _reason(self, exit_code: int | None, way: str) -> str:
        """Return the problem, as far as the exit code and the last line on stderr show it."""
        said = [line.decode(errors="replace").strip() for line in self._errors.lines()]
        last = next((line for line in reversed(said) if line), "")
        is_broken = exit_code is None or (way == SSH and exit_code == SSH_FAILED)
        if self.phase is AgentPhase.RUNNING:
            if last.startswith("ronde: "):
                return last.removeprefix("ronde: ")
            if is_broken:
                return f"the connection by {way} broke, or its agent was killed"
            return f"its agent ended with exit code {exit_code}"
        if is_broken:
            return f"cannot be reached by {way}: {last.removeprefix('ssh: ') or 'it gives no reason'}"
        if "No module named" in last and "ronde" in last:
            python = "the Python that `executable` names" if way not in ("", SSH) else sys.executable
            return f"Ronde is not installed there for {python}: install it in the same place on all hosts"
        if exit_code == NOT_FOUND:
            return (
                f"there is no {sys.executable} there: install the same Python in the same place on all hosts"
            )
        return f"its agent did not start: exit code {exit_code}" + (f" after: {last}" if last else "")
