"""How a driver reaches one agent: three streams, as of a process, and its end.

An agent is a child process of the driver (itself, or an ssh), or the child of a cluster's task, which relays its
streams.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

__all__ = ["AgentStreams", "ChildStreams"]

LAST_WAIT_S = 5  # how long a killed process may take to end


class AgentStreams(Protocol):
    """The streams of an agent. All descriptors are non-blocking.

    `stdin_fd`: for writing; -1 once it is closed. `exited_fd`: becomes readable when the agent has ended and its output
    is complete. `way`: what leads to the agent and may break, such as "ssh"; empty for a child of the driver.
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
        """Kill what leads to the agent. An agent on another host notices that its input has ended."""

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
