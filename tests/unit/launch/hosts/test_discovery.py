"""The host discovery script: repeated calls, and invalid answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.launch.config import Discovery
from ronde.launch.hosts.discovery import HostScript
from ronde.launch.hosts.host_list import Host
from ronde.launch.loop import Loop


class Asked:
    """A script, the hosts that it offered, and its problems."""

    def __init__(self, path: Path, command: str = "") -> None:
        self.path = path
        self.offers: list[tuple[Host, ...]] = []
        self.complaints: list[str] = []
        self.loop = Loop()
        discovery = Discovery(command or str(path), slots=3)
        self.script = HostScript(
            discovery, dict(os.environ), self.loop, self.offers.append, self.complaints.append
        )

    def says(self, text: str) -> None:
        """Make the script do this from now on."""
        new = self.path.with_suffix(".new")
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.rename(self.path)

    def serve(self, until: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not until() and time.monotonic() < deadline:
            self.loop.turn()


@pytest.fixture
def asked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Asked]:
    asked = Asked(tmp_path / "find", getattr(request, "param", "").format(folder=tmp_path))
    try:
        yield asked
    finally:
        asked.script.close()
        asked.loop.close()


def test_changes_are_offered_and_mistakes_reported_once(asked: Asked) -> None:
    asked.says("echo a:2; echo b; echo warning >&2")
    asked.script.ask_for_hosts()
    asked.serve(lambda: asked.offers)
    assert asked.offers == [(("a", 2), ("b", 3))]
    asked.says("echo looking >&2; echo lost >&2; echo x; exit 3")
    asked.serve(lambda: asked.complaints)
    assert asked.complaints == [f"{asked.path} failed with exit code 3: lost"]
    asked.says("echo a:2")
    asked.serve(lambda: len(asked.offers) > 1)
    assert asked.offers[1:] == [(("a", 2),)]
    assert len(asked.complaints) == 1


def test_an_invalid_answer_names_the_line(asked: Asked) -> None:
    asked.says("echo a:2")
    asked.script.ask_for_hosts()
    asked.serve(lambda: asked.offers)
    asked.says("echo a:2; echo b:x")
    asked.serve(lambda: asked.complaints)
    assert asked.complaints[0].startswith(f"line 2 of what {asked.path} printed: 'b:x' is invalid")
    assert len(asked.offers) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [("echo lost >&2; exit 3", "find failed with exit code 3: lost"), ("echo b:x", "'b:x' is invalid")],
)
def test_a_script_that_is_wrong_from_the_beginning_is_refused(asked: Asked, text: str, why: str) -> None:
    """As in horovodrun; a later failure must not end the running job."""
    asked.says(text)
    asked.script.ask_for_hosts()
    with pytest.raises(UsageError, match=why):
        asked.serve(lambda: asked.complaints)


@pytest.mark.parametrize("asked", ["sh {folder}/find 'a b'"], indirect=True)
def test_a_command_with_arguments(asked: Asked) -> None:
    asked.path.write_text('[ "$*" = "a b" ] && echo c:4\n')
    asked.script.ask_for_hosts()
    asked.serve(lambda: asked.offers)
    assert asked.offers == [(("c", 4),)]


@pytest.mark.parametrize("command", ["hosts --all", "./hosts --all", "echo e:6", "hosts"])
def test_a_file_of_this_directory_or_else_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("echo e:6\n")
    Path("hosts").chmod(0o755)
    asked = Asked(tmp_path, command)
    try:
        asked.script.ask_for_hosts()
        asked.serve(lambda: asked.offers)
    finally:
        asked.script.close()
        asked.loop.close()
    assert asked.offers == [(("e", 6),)]


def test_a_file_without_a_first_line_that_says_by_what_it_runs(asked: Asked) -> None:
    asked.path.write_text("echo d:5\n")
    asked.path.chmod(0o755)
    asked.script.ask_for_hosts()
    asked.serve(lambda: asked.offers)
    assert asked.offers == [(("d", 5),)]


def test_a_script_that_cannot_be_run_is_refused(asked: Asked) -> None:
    with pytest.raises(
        UsageError, match=r"cannot run the host discovery script .*: No such file or directory"
    ):
        asked.script.ask_for_hosts()
    asked.path.write_text("echo a")
    with pytest.raises(UsageError, match="Permission denied; expected an executable file"):
        asked.script.ask_for_hosts()
    with pytest.raises(
        UsageError, match="cannot run the host discovery script find 'x: No closing quotation"
    ):
        Asked(asked.path, "find 'x")


def test_a_script_that_runs_is_ended_with_the_job(asked: Asked) -> None:
    asked.says("sleep 600")
    asked.script.ask_for_hosts()


def test_a_script_that_prints_without_end_is_ended(asked: Asked) -> None:
    asked.says("yes")
    asked.script.ask_for_hosts()
    asked.serve(lambda: asked.complaints)
    assert asked.complaints == [f"{asked.path} printed more than 1 MiB, and was ended"]
