"""A Lightning Trainer in elastic training: a rank dies in the middle of an epoch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")

PROGRAM = str(Path(__file__).with_name("lightning_fit.py"))


def fitted(killed: str, *words: str) -> tuple[list[Any], str]:
    """Return each rank's result, which are the same, once, and all output."""
    command = [sys.executable, "-m", "ronde", "run", "-n", "2", *words, PROGRAM, killed]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    results = {line.partition("result ")[2] for line in done.stdout.splitlines() if "result " in line}
    assert len(results) == 1, output
    found: list[Any] = json.loads(results.pop())
    return found, output


@pytest.mark.slow
def test_a_loss_within_fit(tmp_path: Path) -> None:
    """With a spare the parameters are those of an undisturbed run; alone, each sample is in one step of each epoch."""
    undisturbed, _ = fitted("")
    with_spare, output = fitted(str(tmp_path / "spare"), "--spares", "1")
    assert "2 ranks go on from commit" in output
    assert with_spare == undisturbed
    alone, output = fitted(str(tmp_path / "alone"), "--min-np", "1")
    assert "1 rank goes on from commit" in output
    for size, _, seen, _ in (undisturbed, alone):
        assert size in (1, 2)
        assert all(count == 1 for epoch in seen for count in epoch)
