"""`--outcomes`: which tests no run has run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.outcomes import never_ran

ROOT = Path(__file__).parents[2]


def test_what_one_run_skips_another_may_run() -> None:
    first = [
        "ran\ta.py::x\t",
        "skipped\ta.py::y\tSkipped: needs torch",
        "skipped\tb.py\tno Ray",
        "skipped\tc.py\tno Dask",
    ]
    second = ["ran\ta.py::y\t", "ran\tb.py::z\t", "skipped\tb.py::w[1]\tneeds two nodes"]
    assert never_ran(first) == {"Skipped: needs torch": ["a.py::y"], "no Ray": ["b.py"], "no Dask": ["c.py"]}
    assert never_ran([*first, *second]) == {"no Dask": ["c.py"], "needs two nodes": ["b.py::w[1]"]}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_run_notes_what_it_skips(tmp_path: Path, parallel: list[str]) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): pytest.skip('needs a GPU')\n"
        "@pytest.mark.xfail\ndef test_c(): assert False\n"
    )
    (tmp_path / "test_two.py").write_text(
        "import pytest\npytest.importorskip('no_such_package', reason='no package')\n"
    )
    file = tmp_path / "outcomes"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        *parallel,
    ]
    done = subprocess.run(
        [
            *command,
            "-o",
            "pythonpath=",
            "-o",
            "xfail_strict=false",
            f"--outcomes={file}",
            f"--rootdir={tmp_path}",
            str(tmp_path),
        ],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert never_ran(file.read_text().splitlines()) == {
        "Skipped: needs a GPU": ["test_one.py::test_b"],
        "Skipped: no package": ["test_two.py"],
    }
