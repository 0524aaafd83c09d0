"""An agent as its launcher sees it: its greeting, its output, and the reason if it does not start.

Shell scripts play the agent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.driver.agent_process import SSH, AgentPhase, AgentProcess, ChildStreams, EchoFilter
from ronde.launch.driver.driver_messages import Assignment, hello
from ronde.launch.loop import Loop
from ronde.launch.screen import Screen

ASSIGNMENT = Assignment(
    "1", "ab" * 32, ("tcp:127.0.0.1:1",), "/", {}, False, None, LaunchConfig(WorkerSpec(("x" * 200_000,)))
)
assert len(ASSIGNMENT.encode()) > 65536, "more than a pipe takes at once"
HELLO = f"printf '%s\\n' '{hello().decode().strip()}'"


class Started:
    """An agent that a script plays, and the loop that serves it until `ended` or a condition holds."""

    def __init__(self, script: str, *, by_ssh: bool) -> None:
        self.loop = Loop()
        self.screen = Screen(self.loop, lambda: None)
        self.began = False
        self.agent = AgentProcess(
            "b", self.loop, self.screen, EchoFilter(), self._greeted, lambda agent: None
        )
        command = ["/bin/sh", "-c", script]
        self.agent.attach_streams(ChildStreams(command, dict(os.environ), way=SSH if by_ssh else ""))

    def _greeted(self, agent: AgentProcess) -> None:
        self.began = True
        agent.assign(ASSIGNMENT)

    def serve(self, until: AgentPhase) -> AgentProcess:
        deadline = time.monotonic() + 60
        while self.agent.phase is not until and time.monotonic() < deadline:
            self.screen.balance()
            self.agent.balance()
            self.loop.turn()
        return self.agent


@contextmanager
def started(script: str, *, by_ssh: bool = True) -> Iterator[Started]:
    each = Started(script, by_ssh=by_ssh)
    try:
        yield each
    finally:
        each.agent.close()
        each.screen.close()
        each.loop.close()


def why(script: str, *, by_ssh: bool = True) -> str:
    with started(script, by_ssh=by_ssh) as each:
        return each.serve(AgentPhase.ENDED).why


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255",
            "cannot be reached by ssh: connect to host b port 22: Connection refused",
        ),
        ("exit 255", "cannot be reached by ssh: it gives no reason"),
        ("echo 'exec: python: not found' >&2; exit 127", f"there is no {sys.executable} there"),
        ("echo '/x/python: No module named ronde' >&2; exit 1", "Ronde is not installed there for"),
        ("echo motd; echo 'no space' >&2; exit 3", "its agent did not start: exit code 3 after: no space"),
        ("echo 'ronde agent 0.0.1 protocol 9'; sleep 60", "it has Ronde 0.0.1, and this machine"),
        (f"{HELLO}; head -1 >/dev/null; exit 255", "the connection by ssh broke, or its agent was killed"),
        (f"{HELLO}; head -1 >/dev/null; echo 'ronde: cannot work in /x' >&2; exit 2", "cannot work in /x"),
        (f"{HELLO}; head -1 >/dev/null; exit 7", "its agent ended with exit code 7"),
    ],
)
def test_what_was_wrong(script: str, says: str) -> None:
    assert why(script).startswith(says)


def test_login_scripts_may_chat_and_the_assignment_comes_after_the_greeting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = f"echo welcome; echo warning >&2; {HELLO}; head -1 | wc -c; echo working; echo hm >&2"
    with started(script) as each:
        each.serve(AgentPhase.ENDED)
        assert each.began
        each.screen.balance()
    out, err = capfd.readouterr()
    assert out == f"{len(ASSIGNMENT.encode())}\nworking\n"
    assert err == "hm\n"


def test_a_signal_is_passed_on_and_leaving_is_the_end_of_its_input() -> None:
    with started(
        f"{HELLO}; read assignment; read word; [ \"$word\" = 'signal 2' ] && ! read word && exit 9"
    ) as each:
        agent = each.serve(AgentPhase.RUNNING)
        agent.send_signal(2)
        agent.ask_to_leave()
        agent.send_signal(15)  # too late, and no harm
        assert each.serve(AgentPhase.ENDED).why == "its agent ended with exit code 9"


def test_an_agent_without_an_assignment_is_killed() -> None:
    for end in (AgentProcess.ask_to_leave, AgentProcess.kill, lambda agent: agent.send_signal(2)):
        with started("sleep 60") as each:
            end(each.agent)
            assert each.serve(AgentPhase.ENDED).phase is AgentPhase.ENDED


def test_closing_leaves_nothing_behind() -> None:
    with started(f"{HELLO}; sleep 60") as each:
        each.serve(AgentPhase.RUNNING)
    with started("sleep 60"):
        pass


def test_what_all_agents_say_at_once_is_shown_once() -> None:
    echo_filter = EchoFilter()
    assert not echo_filter.is_echo("a", b"ronde: b is lost")
    assert echo_filter.is_echo("c", b"ronde: b is lost")
    assert not echo_filter.is_echo("a", b"ronde: b is lost")  # it says it again
    assert not echo_filter.is_echo("c", b"ronde: d is lost")
    assert not echo_filter.is_echo("a", b"[a:0] a line of a worker")
    assert not echo_filter.is_echo("c", b"[a:0] a line of a worker")
