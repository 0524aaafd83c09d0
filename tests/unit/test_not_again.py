"""`--not-again`: which tests a second run leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.fixture
def leaks():
    yield
    pytest.fail("left behind")

def test_a(): pass
def test_b(leaks): pass
def test_c(): assert False
"""


@pytest.mark.slow
def test_a_test_whose_fixture_fails_runs_again(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    options = ["-n", "2", "-o", "pythonpath=", f"--not-again={tmp_path / 'passed'}", f"--rootdir={tmp_path}"]
    for _ in range(2):
        done = subprocess.run([*command, *options, tmp_path], cwd=ROOT, check=False, capture_output=True)
        assert done.returncode == 1, done.stdout
        assert (tmp_path / "passed").read_text() == "test_one.py::test_a\n"
    assert b"1 failed, 1 passed, 1 error" in done.stdout
