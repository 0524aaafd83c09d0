"""One agent that the launcher started, by ssh or as a child: its greeting, assignment, output and end.

    WAITING --its hello--> RUNNING --it, or its ssh, exits--> ENDED

Until the greeting, the launcher does not show standard output, because login scripts may print anything. It keeps
standard error, which explains why an agent did not start.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import IO

from ronde.launch.driver.assignment import HELLO, Assignment, hello
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import Screen
from ronde.process.output import LineSplitter, OutputStream, Piece, Sink, Source, Tail

__all__ = ["AgentProcess", "Chorus", "AgentPhase"]

MOST_UNREAD = 1 << 20  # an agent with more unread input does not read any
READ_BYTES = 64 * 1024
ECHO_NS = 10 * 10**9
LAST_WAIT_S = 5  # how long a killed process may take to end
LAST_WORD_NS = 20 * 10**9  # for an agent that ends its workers and leaves
SSH_FAILED, NOT_FOUND = 255, 127


class Chorus:
    """Shows a message that several agents print at the same time once; workers' lines are not its concern."""

    def __init__(self) -> None:
        self._said: deque[tuple[int, str, bytes]] = deque(maxlen=100)

    def is_echo(self, agent: str, line: bytes) -> bool:
        """Return whether another agent has just printed this line, and remember it."""
        if not line.startswith(b"ronde: "):
            return False
        since_ns = time.monotonic_ns() - ECHO_NS
        others = [who for at_ns, who, what in self._said if what == line and at_ns >= since_ns]
        if others and agent not in others:
            return True
        self._said.append((time.monotonic_ns(), agent, line))
        return False


class _Complaints(OutputStream):
    """Standard error of an agent, without messages that another agent printed."""

    def __init__(self, pipe: IO[bytes], agent: str, chorus: Chorus, sink: Sink, tail: Tail) -> None:
        super().__init__(pipe, Source(0, f"stderr of {agent}", b""), sink, tail)
        self._agent, self._chorus = agent, chorus

    def _pass_on(self, pieces: list[Piece]) -> None:
        super()._pass_on([piece for piece in pieces if not self._chorus.is_echo(self._agent, piece.text)])


class AgentPhase(Enum):
    """How far an agent has come."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


class AgentProcess:
    """An agent on the host `name`, started by `argv`; `by_ssh`: the command is an ssh.

    `began` is called when the agent has said hello and got its assignment, `ended` when its process or the ssh has
    exited; `why` is then the problem, or empty. Raises OSError if the process cannot start.
    """

    def __init__(
        self,
        name: str,
        assignment: Assignment,
        argv: Sequence[str],
        environment: Mapping[str, str],
        loop: Loop,
        screen: Screen,
        chorus: Chorus,
        began: Callable[[AgentProcess], None],
        ended: Callable[[AgentProcess], None],
        *,
        by_ssh: bool,
    ) -> None:
        self.name, self.id = name, assignment.agent
        self.phase = AgentPhase.WAITING
        self.why = ""
        self._assignment = assignment
        self._by_ssh = by_ssh
        self._loop, self._screen, self._chorus = loop, screen, chorus
        self._began, self._ended = began, ended
        self._popen = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the launcher gets Ctrl-C and passes it on
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        self._unwritten = b""  # an ordinary user's pipes may hold as little as 4 KiB
        self._leaving = False  # its input ends once everything is written
        self._greeting = b""
        self._complaints, self._splitter = Tail(), LineSplitter()
        self._streams: set[OutputStream] = set()
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError:
            self.kill()
            with self._popen:  # closes the pipes and waits
                raise
        self._loop.watch(self._pidfd, Order.EXITS, self._exited)
        self._loop.watch(self._stdout.fileno(), Order.OUTPUT, self._read_greeting)
        self._loop.watch(self._stderr.fileno(), Order.OUTPUT, self._read_complaints)

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
        """Kill the process; an agent at the other end of an ssh notices that its input has ended."""
        self.why = self.why or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def balance(self) -> None:
        """Read from the agent only while the launcher's streams accept output. Call this before each turn."""
        for stream in self._streams:
            pump = partial(self._pump, stream)
            self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Kill the process and close everything. A running agent on another host notices it."""
        if self.phase is not AgentPhase.ENDED:
            self.kill()
            self._let_go()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # a hung mount may hold even a killed process
                self._popen.wait(timeout=LAST_WAIT_S)

    # Until the agent's greeting

    def _read_greeting(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._stdout.fileno())
            return
        lines = (self._greeting + data).split(b"\n")
        self._greeting = lines.pop()[-READ_BYTES:]
        for line in lines:
            if line.startswith(HELLO):
                self._welcome(line + b"\n")
                return

    def _welcome(self, line: bytes) -> None:
        if line != hello():
            there, here = (text[len(HELLO) :].split()[0].decode() for text in (line, hello()))
            self.kill(f"it has Ronde {there}, and this machine {here}: install the same on both")
            return
        self._read_complaints()  # earlier lines are not shown
        self.phase = AgentPhase.RUNNING
        self._loop.unwatch(self._stdout.fileno())
        self._loop.unwatch(self._stderr.fileno())
        self._write(self._assignment.encode())
        self._complaints, self._splitter = Tail(), LineSplitter()
        self._streams = {
            OutputStream(self._stdout, Source(0, f"stdout of {self.name}", b""), self._screen.out),
            _Complaints(self._stderr, self.name, self._chorus, self._screen.err, self._complaints),
        }
        self._began(self)

    def _read_complaints(self) -> None:
        try:
            data = os.read(self._stderr.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._stderr.fileno())
        self._complaints.add(self._splitter.feed(data) if data else self._splitter.finish())

    def _write(self, data: bytes) -> None:
        """Write the data, as much as the pipe takes now and the rest later."""
        if len(self._unwritten) > MOST_UNREAD:
            self.kill("it does not read its input")
        self._unwritten += data
        self._write_on()

    def _write_on(self) -> None:
        fd = self._stdin.fileno()
        try:
            self._unwritten = self._unwritten[os.write(fd, self._unwritten) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the agent is about to end, and may still print the reason
            self._unwritten, self._leaving = b"", True
            deaf = partial(self.kill, "it does not read its input")
            self._loop.set_timer(self, time.monotonic_ns() + LAST_WORD_NS, deaf)
        wanted = bool(self._unwritten)
        self._loop.watch(fd, Order.SINKS, self._write_on, wanted=wanted, events=selectors.EVENT_WRITE)
        if self._leaving and not wanted:
            self._stdin.close()

    # The agent's end

    def _pump(self, stream: OutputStream) -> None:
        if stream.pump() is None:
            self._close_stream(stream)

    def _close_stream(self, stream: OutputStream) -> None:
        self._loop.unwatch(stream.fileno())
        self._streams.remove(stream)
        stream.close()

    def _exited(self) -> None:
        if self.phase is AgentPhase.WAITING:
            self._read_complaints()
            self._complaints.add(self._splitter.finish())
        for stream in self._streams:
            stream.drain()
        returncode = self._popen.wait()
        self.why = self.why or self._reason(returncode)
        self._let_go()
        self._ended(self)

    def _let_go(self) -> None:
        if self.phase is AgentPhase.WAITING:
            self._loop.unwatch(self._stdout.fileno())
            self._loop.unwatch(self._stderr.fileno())
        self.phase = AgentPhase.ENDED
        self._loop.set_timer(self, None, self.kill)
        if not self._stdin.closed:
            self._loop.unwatch(self._stdin.fileno())
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        for stream in list(self._streams):
            self._close_stream(stream)
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()

    def _reason(self, returncode: int) -> str:
        """Return the problem, as far as the exit code and the last line on stderr show it."""
        said = [line.decode(errors="replace").strip() for line in self._complaints.lines()]
        last = next((line for line in reversed(said) if line), "")
        if self.phase is AgentPhase.RUNNING:
            if last.startswith("ronde: "):
                return last.removeprefix("ronde: ")
            if self._by_ssh and returncode == SSH_FAILED:
                return "the connection by ssh broke, or its agent was killed"
            return f"its agent ended with exit code {returncode}"
        if self._by_ssh and returncode == SSH_FAILED:
            return f"cannot be reached by ssh: {last.removeprefix('ssh: ') or 'it gives no reason'}"
        if "No module named" in last and "ronde" in last:
            return f"Ronde is not installed there for {sys.executable}: install it in the same place on all hosts"
        if returncode == NOT_FOUND:
            return (
                f"there is no {sys.executable} there: install the same Python in the same place on all hosts"
            )
        return f"its agent did not start: exit code {returncode}" + (f" after: {last}" if last else "")
