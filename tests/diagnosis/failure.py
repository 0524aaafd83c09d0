"""One planted failure: a small program with a mistake, and the messages that `ronde run` must print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HANGING_S = 120.0

VARIATION = (pytest.mark.slow,)  # marks a failure of a kind that the quick tests have already

# How most programs begin.
BEGINNING = """\
import os, signal, sys, threading, time
import numpy as np
import ronde
ronde.init()
world, rank = ronde.world(), ronde.rank()
"""


@dataclass(frozen=True)
class Failure:
    """A mistake, and what becomes of it.

    `program`: the script, after `beginning`. `says`: regular expressions; the output must match them in this order.
    `never`: regular expressions that it must not match. `exit_code`: of `ronde run`. `within_s`: by when it must have
    ended, generously. `options`: of `ronde run`. `command`: what it runs, instead of the script. `environment`: what is
    set beside the test's own. `shell`: what a shell does before it runs `ronde run`, such as setting a limit. `marks`:
    why the test is not always run.
    """

    name: str
    program: str
    says: tuple[str, ...]
    exit_code: int = 1
    never: tuple[str, ...] = ()
    within_s: float = 30.0
    options: tuple[str, ...] = ("-n", "2")
    beginning: str = BEGINNING
    command: tuple[str, ...] = ("script.py",)
    environment: Mapping[str, str] = field(default_factory=dict)
    shell: str = ""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def run(self, folder: Path) -> Ending:
        """Run the program in the folder, to its end."""
        (folder / "script.py").write_text(self.beginning + textwrap.dedent(self.program).lstrip("\n"))
        command = [sys.executable, "-m", "ronde", "run", *self.options, *self.command]
        begun = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", f'{self.shell}\nexec "$@"', "bash", *command],
            cwd=folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
        )
        try:
            output, _ = process.communicate(timeout=HANGING_S)
        finally:
            process.kill()
            process.wait()
        return Ending(process.returncode, output, time.monotonic() - begun)

    def check(self, ending: Ending) -> None:
        """Compare what has happened with what must."""
        place = 0
        for pattern in self.says:
            found = re.compile(pattern, re.MULTILINE).search(ending.output, place)
            assert found, f"{self.name}: nothing like {pattern!r} from character {place} of\n{ending.output}"
            place = found.end()
        for pattern in self.never:
            assert not re.search(pattern, ending.output), (
                f"{self.name}: {pattern!r} is said in\n{ending.output}"
            )
        assert ending.exit_code == self.exit_code, ending.output
        assert ending.took_s <= self.within_s, f"{self.name}: took {ending.took_s:.1f} s\n{ending.output}"


@dataclass(frozen=True)
class Ending:
    """How `ronde run` has ended, and what it has shown on both streams."""

    exit_code: int
    output: str
    took_s: float


def as_parameters(failures: list[Failure]) -> list[object]:
    """Return the failures for `pytest.mark.parametrize`, each under its name."""
    return [pytest.param(each, id=each.name.replace(" ", "-"), marks=each.marks) for each in failures]
