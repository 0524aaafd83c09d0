"""What the pages promise: their programs run, their command lines are valid, their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks.pages import PAGES, ROOT, Run, blocks, pages, run_programs

from ronde import cli


@pytest.mark.parametrize(("page", "planned"), pages())
def test_programs_of_a_page_run_in_its_order(page: str, planned: list[Run], tmp_path: Path) -> None:
    text = "".join(run.program for run in planned)
    if "cluster=" in text:
        pytest.importorskip("cloudpickle")  # sends a function of the program to other processes
    if "pyarrow" in text:
        pytest.importorskip("pyarrow")
    if "ronde.ml" in text or "sklearn" in text:
        pytest.importorskip("sklearn")
    if "pandas" in text:
        pytest.importorskip("pandas")
    run_programs(planned, tmp_path)


def command_lines() -> Iterator[object]:
    """What follows `ronde run` in blocks, and in sentences where a script follows."""
    for page, text in PAGES.items():
        lines = "".join(blocks(page, "", "sh")).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`(ronde run -(?!n N)[^`.]*\.py)`", text)
        for line in lines:
            if start := re.search(r"^[^#]*\bronde run ", line):
                words = shlex.split(line[start.end() :].rstrip('"'), comments=True)
                marks = [pytest.mark.slow] if "--autotune" in words else []  # imports a large library
                yield pytest.param(words, id=f"{page}: {' '.join(words)}", marks=marks)


@pytest.fixture
def folder_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the command lines name."""
    examples = ("digits.py", "digits_torch.py", "ddp_digits.py", "fsdp_digits.py")
    scripts = (
        "train.py",
        "mean.py",
        "ddp.py",
        "package/module.py",
        *(f"examples/{name}" for name in examples),
    )
    for script in scripts:
        (tmp_path / script).parent.mkdir(exist_ok=True)
        (tmp_path / script).touch()
    (tmp_path / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    for program in ("program", "hosts.sh", "ronde"):
        (tmp_path / program).write_text("#!/bin/sh\necho node1:4\n")
        (tmp_path / program).chmod(0o700)
    for name in [name for name in os.environ if name.startswith(("PET_", "RONDE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", list(command_lines()))
@pytest.mark.usefixtures("folder_of_a_user")
def test_command_lines_are_valid(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "--autotune" in words:
        pytest.importorskip("bayes_opt")
    assert cli.main(["run", "--dry-run", *words]) == 0, capsys.readouterr().err


def test_configuration_files_are_valid(folder_of_a_user: Path) -> None:
    for block in [block for page in PAGES for block in blocks(page, "toml")]:
        assert tomllib.loads(block)
    for block in [block for page in PAGES for block in blocks(page, "yaml")]:
        (folder_of_a_user / "config.yaml").write_text(block)
        reader = ["--config-file", "config.yaml"]
        if block.startswith("kind:"):
            reader = ["--cluster", "kubernetes", "--image", "lab/train", "--patch", "config.yaml"]
        assert cli.main(["run", "--dry-run", *reader, "train.py"]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_first_two_shell_blocks_are_one_line_each() -> None:
    """Scripts, .ci/run among them, take the demo from the first and the quick tests from the second."""
    demo, tests = blocks("README.md", "sh")
    assert demo.count("\n") == 1
    assert "examples/" in demo
    assert tests.count("\n") == 1
    assert "pytest" in tests
