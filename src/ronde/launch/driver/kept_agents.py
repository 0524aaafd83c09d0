"""Agents as child processes of a task, and those that wait for the next task of the same process.

An agent that has ended its job well may wait for another order. Its claim, an eventfd, then becomes readable. The one
that reads it decides: the next task, which gives the agent an order, or the agent, which ends if no task comes for
`IDLE_NS`. The agent also ends with this process, because its standard input does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

__all__ = ["TaskAgent", "keep_agent", "take_agent"]

IDLE_NS = 60 * 10**9


class TaskAgent:
    """An agent, with pipes to this process. `can_wait`: whether it may wait for another order after its job.

    Raises OSError if it cannot start.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], can_wait: bool) -> None:
        self.start = _start_of(command, environment)
        self.claim = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if can_wait else -1
        try:
            self.process = subprocess.Popen(
                [*command, str(self.claim), str(IDLE_NS)] if can_wait else command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(self.claim,) if can_wait else (),
            )
        except BaseException:
            self._close_claim()
            raise
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def take(self) -> bool:
        """Return whether it waits, and now for an order of the caller."""
        if self.process.poll() is not None:
            return False
        try:
            os.eventfd_read(self.claim)
        except BlockingIOError:  # it is about to end
            return False
        return True

    def end(self) -> None:
        """Kill an agent that waits, and close everything."""
        self.close()
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Close the pipes: an agent that runs ends its workers and leaves."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self._close_claim()

    def _close_claim(self) -> None:
        if self.claim >= 0:
            os.close(self.claim)
            self.claim = -1


_kept: list[TaskAgent] = []
_lock = threading.Lock()


def keep_agent(agent: TaskAgent) -> None:
    """Keep an agent that waits, for `take_agent`."""
    with _lock:
        _kept.append(agent)


def take_agent(command: Sequence[str], environment: Mapping[str, str]) -> TaskAgent | None:
    """Return an agent that waits and was started in the same way; None if there is none. Any thread may call this.

    Ends those that were started in another way.
    """
    start = _start_of(command, environment)
    with _lock:
        while _kept:
            agent = _kept.pop()
            if agent.start == start and agent.take():
                return agent
            agent.end()
    return None


def _start_of(command: Sequence[str], environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what an agent takes over when it starts."""
    folder = ""
    with suppress(OSError):  # it may have been removed
        folder = os.getcwd()
    return list(command), dict(environment), folder, os.sched_getaffinity(0)


def _forget_in_child() -> None:
    for agent in _kept:
        agent.close()
        agent.process.returncode = 0  # its parent waits for it
    _kept.clear()


os.register_at_fork(after_in_child=_forget_in_child)
