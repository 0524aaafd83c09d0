"""A file beside the program that hides a module is found by what the failed import says."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.hidden_modules import describe_hiding

MESSAGES = {
    "random": "ImportError: cannot import name 'Random' from 'random' ({file})",
    "numpy": "ModuleNotFoundError: No module named 'numpy.linalg'; 'numpy' is not a package",
    "ronde": "AttributeError: partially initialized module 'ronde' has no attribute 'init'",
    "json": "AttributeError: module 'json' has no attribute 'dumps'",
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_the_file_is_named(tmp_path: Path, name: str, form: str) -> None:
    file = tmp_path / form.format(name)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    first = f'Traceback (most recent call last):\n  File "{tmp_path}/train.py", line 1, in <module>\n'
    text = first + MESSAGES[name].format(file=file)
    owner = "the installed" if name in ("numpy", "ronde") else "Python's"
    expected = f"{file} hides {owner} module '{name}' from this program: rename it"
    assert describe_hiding(text) == describe_hiding(text, str(tmp_path)) == expected
    file.unlink()
    assert describe_hiding(text) == ""


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: module 'trainer' has no attribute 'fit'",  # there is no other one
        "AttributeError: module 'time' has no attribute 'now'",  # which no file can hide
        "AttributeError: 'Trainer' object has no attribute 'fit'",
        "ValueError: module",
    ],
)
def test_other_errors_say_nothing(tmp_path: Path, message: str) -> None:
    for name in ("trainer", "time", "Trainer", "module"):
        (tmp_path / f"{name}.py").touch()
    assert describe_hiding(message, str(tmp_path)) == ""


SCRIPT = 'Traceback (most recent call last):\n  File "{folder}/scripts/train.py", line 1, in <module>\n'
MODULE = 'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\n'
LACKS = "AttributeError: module 'random' has no attribute 'x'"


@pytest.mark.parametrize(
    ("traceback", "is_hidden"),
    [
        (MODULE + LACKS, True),
        (MODULE.replace("<frozen runpy>", "<string>") + LACKS, True),
        (SCRIPT + LACKS, False),
        (MODULE + "ValueError\n\nDuring handling\n\n" + SCRIPT + LACKS, False),
        (SCRIPT + "ValueError\n\nDuring handling\n\n" + MODULE + LACKS, True),
        (LACKS, False),
        (MODULE + f'  File "{random.__file__}", line 3, in choice\n' + LACKS, False),
        (MODULE + f"ImportError: cannot import name 'x' from 'random' ({random.__file__})", False),
        (MODULE + "ImportError: cannot import name 'x' from 'random' ({folder}/random/__init__.py)", True),
    ],
)
def test_only_the_file_that_the_program_gets_hides_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traceback: str, is_hidden: bool
) -> None:
    """With a folder `random` in the current folder, which a script elsewhere does not see."""
    (tmp_path / "random").mkdir()
    (tmp_path / "random/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert bool(describe_hiding(traceback.format(folder=tmp_path))) is is_hidden


def test_a_module_of_python_in_its_own_folder_hides_nothing() -> None:
    import tempfile

    text = f"  File \"{tempfile.__file__}\", line 3\nAttributeError: module 'random' has no attribute 'x'"
    assert describe_hiding(text) == ""


def test_a_program_without_a_launcher_learns_it_too(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").touch()
    (tmp_path / "train.py").write_text("import ronde\nronde.init()\n")
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.stderr.endswith(
        f"{tmp_path}/numpy.py hides the installed module 'numpy' from this program: rename it\n"
    )
