"""A sharded model (FSDP2) whose ranks die: a spare gets the lost shards from the rank that has kept copies of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = str(Path(__file__).with_name("fsdp.py"))


def trained(*words: str, script: tuple[str, ...] = ()) -> tuple[set[str], str]:
    """Return the sums of the parameters at the end, one for each rank that differs, and all output."""
    command = [sys.executable, "-m", "ronde", "run", "-n", "2", *words, PROGRAM, *script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"parameters (\S+)", done.stdout)), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__ < "2.6", reason="torch.distributed.fsdp has fully_shard from PyTorch 2.6 on"
)
def test_a_lost_shard_comes_back(tmp_path: Path) -> None:
    undisturbed, _ = trained()
    disturbed, output = trained("--spares", "1", script=(str(tmp_path / "killed"),))
    assert "2 ranks go on from commit 10, 1 of them new" in output
    assert len(undisturbed) == 1
    assert disturbed == undisturbed
