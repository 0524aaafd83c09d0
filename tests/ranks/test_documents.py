"""What the pages promise: their programs run, their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
PROGRAMS = [
    pytest.param(block, id=page)
    for page, text in PAGES.items()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if "ronde.init()\n" in block
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(program: str, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "ronde", "run", "-n", str(ranks), str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_first_two_shell_blocks_are_one_line_each() -> None:
    """Scripts, .ci/run among them, take the demo from the first and the quick tests from the second."""
    demo, tests = re.findall(r"^```sh\n(.*?)^```", PAGES["README.md"], re.DOTALL | re.MULTILINE)
    assert demo.count("\n") == 1
    assert "examples/" in demo
    assert tests.count("\n") == 1
    assert "pytest" in tests
