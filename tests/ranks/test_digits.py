"""The examples under `ronde run`: they learn, `digits.py` and `digits_torch.py` with any number of ranks alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(example: str, n: int, *options: str) -> list[str]:
    """Runs an example on n ranks and returns the lines of its output."""
    command = [sys.executable, "-m", "ronde", "run", "-n", str(n), str(EXAMPLES / example), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_accurate(line: str) -> None:
    accuracy = re.fullmatch(r"\[0\] held-out accuracy: (0\.\d{4}|1\.0000)", line)
    assert accuracy is not None, line
    assert float(accuracy[1]) >= 0.97


@pytest.mark.parametrize(
    ("example", "sizes", "tolerance"), [("digits.py", (1, 2, 4), 1e-6), ("digits_torch.py", (1, 2, 3), 1e-4)]
)
def test_losses_do_not_depend_on_the_number_of_ranks(
    example: str, sizes: tuple[int, ...], tolerance: float, tmp_path: Path
) -> None:
    if example == "digits_torch.py":
        pytest.importorskip("torch")
    losses = {}
    for n in sizes:
        file = tmp_path / f"{n}.txt"
        lines = train(example, n, "--steps", "100", "--losses", str(file))
        assert f"[0] ranks: {n}, their parameters bitwise equal" in lines
        losses[n] = [float(line) for line in file.read_text().splitlines()]
    assert len(losses[1]) == 100
    assert losses[1][-1] < losses[1][0] / 5
    for n in sizes:
        assert losses[n] == pytest.approx(losses[1], rel=tolerance)


def test_digits_reaches_its_accuracy() -> None:
    assert_accurate(train("digits.py", 2)[-1])


def test_digits_torch_reaches_its_accuracy_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "training.png"
    lines = train("digits_torch.py", 2, "--plot", str(picture))
    assert any(re.fullmatch(r"\[0\] time waiting for communication: \d+\.\d%", line) for line in lines)
    assert_accurate(lines[-1])
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_elastic_digits_have_the_same_bits_with_any_number_of_ranks() -> None:
    alone, together = (train("elastic_digits.py", n, "--epochs", "15") for n in (1, 3))
    assert alone[0].startswith("[0] parameters: ")
    assert alone[0] == together[0]
    assert_accurate(together[-1])


def test_ddp_digits_reaches_its_accuracy() -> None:
    pytest.importorskip("torch")
    assert_accurate(train("ddp_digits.py", 2)[-1])


def test_fsdp_digits_reaches_its_accuracy() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs PyTorch 2.6 or later")
    assert_accurate(train("fsdp_digits.py", 2)[-1])
