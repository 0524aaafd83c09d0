"""`examples/digits_torch.py` under `ronde run`: it learns, and the number of ranks changes nothing but rounding."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("torch")
pytest.importorskip("tqdm")

EXAMPLE = str(Path(__file__).parents[3] / "examples/digits_torch.py")


def train(n: int, *options: str) -> list[str]:
    """Runs it on n ranks and returns the lines of its output."""
    command = [sys.executable, "-m", "ronde", "run", "-n", str(n), EXAMPLE, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    losses = {}
    for n in (1, 2, 3):
        file = tmp_path / f"{n}.txt"
        lines = train(n, "--steps", "100", "--losses", str(file))
        assert f"[0] ranks: {n}, their parameters bitwise equal" in lines
        losses[n] = [float(line) for line in file.read_text().splitlines()]
    assert len(losses[1]) == 100
    assert losses[1][-1] < losses[1][0] / 5
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[3] == pytest.approx(losses[1], rel=1e-4)


def test_the_digits_are_read_well(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "training.png"
    lines = train(2, "--plot", str(picture))
    assert any(re.fullmatch(r"\[0\] time waiting for communication: \d+\.\d%", line) for line in lines)
    last = re.fullmatch(r"\[0\] held-out accuracy: (0\.\d{4}|1\.0000)", lines[-1])
    assert last is not None
    assert float(last[1]) >= 0.97
    assert picture.stat().st_size > 0
