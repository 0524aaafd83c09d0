"""A user without rights who crowds every socket of a job while it starts ends no start and fills no log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.attacks.crowds import stalker

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.alone]

HANGING_S = 120
CONNECTIONS = 3000
PROGRAM = """
import os, time
import numpy, ronde

time.sleep(int(os.environ["RANK"]))  # so that the crowd is at rank 0 before rank 1 comes
ronde.init()
print(int(ronde.world().allreduce(numpy.array([1]))[0]), flush=True)
"""
SPEAKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "RONDE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


@pytest.mark.parametrize(
    "words", [b"", b"RNDE", b"GET / HTTP/1.0\r\n\r\n"], ids=["silent", "dawdling", "foreign"]
)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_job_starts_in_a_crowd(transport: str, words: bytes) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
    with stalker(CONNECTIONS, words):
        done = subprocess.run(
            [sys.executable, "-m", "ronde", "run", "-n", "2", sys.executable, "-c", PROGRAM],
            env={**environ, "RONDE_TRANSPORT": transport, "RONDE_START_TIMEOUT": "60"},
            check=False,
            capture_output=True,
            text=True,
            timeout=HANGING_S,
        )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]
    assert len(done.stderr.splitlines()) <= 20
