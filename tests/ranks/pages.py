"""The programs in the pages: what stands in blocks of `python`.

1. A block that imports Ronde begins a program. A block that does not continues the program above it on the page.
2. A program may begin with a comment that says how to start it: `# train.py: ronde run -n 3 train.py`. It is started
   so, and any other one with one rank and with two.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
NEEDS = ("spark", "ray", "dask", "flink", "torch")  # tests/clusters runs those that need an engine
COMMANDS = {"ronde": (sys.executable, "-m", "ronde"), "python": (sys.executable,)}


def blocks(page: str, *languages: str) -> list[str]:
    """Return the blocks of a page in one of the languages."""
    found = re.findall(r"^```(\S*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def programs(need: str = "") -> list[object]:
    """Return program and command line for each run of each program that imports this package of `NEEDS`, or none."""
    found: list[object] = []
    for page in PAGES:
        texts: list[str] = []
        for block in blocks(page, "python"):
            if not texts or re.search(r"^(import|from) ronde\b", block, re.MULTILINE):
                texts.append(block)
            else:
                texts[-1] += block
        for text in texts:
            if need == need_of(text):
                marks = [] if page == "README.md" else [pytest.mark.slow]
                found += [
                    pytest.param(text, command, id=f"{page}: {command}", marks=marks)
                    for command in _commands(text)
                ]
    return found


def need_of(program: str) -> str:
    """Return the first package of `NEEDS` that the program imports, directly or by Ronde, else ""."""
    imported = re.findall(r"^(?:import|from) (.+)", program, re.MULTILINE)
    return next((need for need in NEEDS if re.search(rf"\b(py)?{need}\b", " ".join(imported))), "")


def run_program(program: str, command: str, folder: Path) -> str:
    """Run the program in the folder and return its output. Fails if it fails, or prints less than it should."""
    verb, *words = shlex.split(command)
    (script,) = (word for word in words if word.endswith(".py"))
    (folder / script).write_text(program)
    done = subprocess.run([*COMMANDS[verb], *words], check=False, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print(" not in program
    return done.stdout


def _commands(program: str) -> list[str]:
    if named := re.match(r"# \S+\.py: (.+)\n", program):
        return [named[1]]
    return [f"ronde run -n {ranks} program.py" for ranks in (1, 2)]
