"""One node or rank has another job key: it is told at once, and whoever waits for it learns who was turned away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_port

pytestmark = pytest.mark.slow

HANGING_S = 120
SPEAKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "RONDE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
TURNED_AWAY = (
    r"turned away (a connection|\d+ more connections, the last) from 127\.0\.0\.1:\d+: .*the job key"
)
STRANGE = "does not know the job key"


def both(words: list[str], directory: Path, *variables: dict[str, str]) -> list[str]:
    """What the first one writes to standard error, whom the second one of another key was to join; both fail."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
    ends = [
        subprocess.Popen(
            words,
            cwd=directory,
            env={**clean, **more, "RONDE_JOB_KEY": key * 32},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for key, more in zip(("11", "22"), variables, strict=True)
    ]
    right, wrong = (end.communicate(timeout=HANGING_S)[1] for end in ends)
    assert all(end.returncode for end in ends)
    assert STRANGE in wrong
    return right.splitlines()


def test_a_node_with_another_key_is_turned_away_and_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    line = f"run --nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port('127.0.0.1')} train.py"
    serves, comes = ({"PET_RDZV_CONF": f"join_timeout=15,is_host={word}"} for word in ("true", "false"))
    lines = both([sys.executable, "-m", "ronde", *line.split()], tmp_path, serves, comes)
    assert re.search(
        f"waited 15 s for all nodes: 1 of 2 nodes is here.*; the store here {TURNED_AWAY}", lines[-1]
    )


def test_a_rank_with_another_key_is_turned_away_and_named(tmp_path: Path) -> None:
    port = str(free_port("127.0.0.1"))
    rank = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RONDE_START_TIMEOUT": "15"}
    program = [sys.executable, "-c", "import ronde; ronde.init()"]
    lines = both(program, tmp_path, {**rank, "RANK": "0"}, {**rank, "RANK": "1"})
    assert re.search(rf"waited 1[45]\S* s for rank 1 of 2 to join at .*; the store {TURNED_AWAY}", lines[-1])
