"""The programs in the pages: what stands in blocks of `python`.

1. A block begins a program. It continues the program above it on the page if its first line says so:
   `# continues train.py`.
2. A program may begin with a comment that says how to start it: `# train.py: ronde run -n 3 train.py`. It is started
   so, and any other one with one rank and with two.
3. A reader tries the programs of a page one after the other in the same folder, so one must not disturb the next.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
NEEDS = ("spark", "ray", "dask", "flink", "torch")  # tests/clusters runs those that need an engine
BY_HAND = ("docs/debugging.md",)  # tests/ranks/launcher/test_debuggers.py is the user at the debugger
COMMANDS = {
    "ronde": (sys.executable, "-m", "ronde"),
    "python": (sys.executable,),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}


class Run(NamedTuple):
    """A program, the command line that starts it, and the package of `NEEDS` that it imports, else ""."""

    program: str
    command: str
    need: str


def blocks(page: str, *languages: str) -> list[str]:
    """Return the blocks of a page in one of the languages."""
    found = re.findall(r"^```(\S*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def programs(need: str = "") -> list[object]:
    """Return program and command line for each run of each program that imports this package of `NEEDS`, or none."""
    return [
        pytest.param(run.program, run.command, id=f"{page}: {run.command}", marks=_marks(page, [run]))
        for page in _started_alone()
        for run in runs(page)
        if run.need == need
    ]


def pages(need: str = "") -> list[object]:
    """Return page and runs for each page: its programs, in order, that import this package or none of `NEEDS`.

    Pages without a program that imports this package are left out.
    """
    of_page = {page: [run for run in runs(page) if run.need in ("", need)] for page in _started_alone()}
    return [
        pytest.param(page, planned, id=page, marks=_marks(page, planned))
        for page, planned in of_page.items()
        if any(run.need == need for run in planned)
    ]


def runs(page: str) -> list[Run]:
    """Return each run of each program of a page, in order."""
    texts: list[str] = []
    for block in blocks(page, "python"):
        if re.match(r"# continues \S+\.py\b", block):
            texts[-1] += block
        else:
            texts.append(block)
    return [Run(text, command, need_of(text)) for text in texts for command in _commands(text)]


def need_of(program: str) -> str:
    """Return the first package of `NEEDS` that the program imports, directly or by Ronde, else ""."""
    imported = re.findall(r"^(?:import|from) (.+)", program, re.MULTILINE)
    return next((need for need in NEEDS if re.search(rf"\b(py)?{need}\b", " ".join(imported))), "")


def run_programs(planned: list[Run], folder: Path) -> list[str]:
    """Run the programs one after the other in the folder, as a reader of the page does, and return their outputs."""
    return [run_program(run.program, run.command, folder) for run in planned]


def run_program(program: str, command: str, folder: Path) -> str:
    """Run the program in the folder and return its output. Fails if it fails, or prints less than it should."""
    verb, *words = shlex.split(command)
    (script,) = (word for word in words if word.endswith(".py"))
    (folder / script).write_text(program)
    done = subprocess.run([*COMMANDS[verb], *words], check=False, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print(" not in program
    return done.stdout


def _started_alone() -> list[str]:
    return [page for page in PAGES if page not in BY_HAND]


def _marks(page: str, planned: list[Run]) -> list[pytest.MarkDecorator]:
    is_ml = any("ronde.ml" in run.program for run in planned)
    lacks = pytest.mark.skipif(is_ml and find_spec("sklearn") is None, reason="needs scikit-learn")
    return [lacks] if page == "README.md" else [lacks, pytest.mark.slow]


def _commands(program: str) -> list[str]:
    if named := re.match(r"# \S+\.py: (.+)\n", program):
        return [named[1]]
    return [f"ronde run -n {ranks} program.py" for ranks in (1, 2)]
