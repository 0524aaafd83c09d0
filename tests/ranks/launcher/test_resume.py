"""examples/resume_torch.py: a killed job resumes from its last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume_torch.py"


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ronde", "run", "-n", "2", *options, str(EXAMPLE)]
    command += ["--checkpoints", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def process_of_rank_1(folder: Path) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = str(folder).encode() in (process / "cmdline").read_bytes()
            if is_ours and b"\0RANK=1\0" in b"\0" + (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError("rank 1 does not run")


def saved_steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"saved step (\d+)", output)]


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    with start(tmp_path, "--max-restarts", "1") as job:
        assert job.stdout
        before = ""
        while "saved step 99" not in before:
            before += job.stdout.readline()
        os.kill(process_of_rank_1(tmp_path), signal.SIGKILL)
        after = job.stdout.read()
    assert job.returncode == 0, after
    resumed = re.search(r"going on after step (\d+)", after)
    assert resumed
    assert int(resumed[1]) in saved_steps(before + after)
    # Each once: nothing was done again from the start.
    assert saved_steps(before + after) == list(range(49, 600, 50))
    accuracy = re.search(r"held-out accuracy: (\S+)", after)
    assert accuracy
    assert float(accuracy[1]) > 0.95
