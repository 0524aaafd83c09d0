"""How workers get the job's key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ronde.process.resources import free_port

WORKER = """
import os, sys
import numpy, ronde

def shown():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]  # one of them is that of the listing itself
    return any("ronde-job-key" in os.readlink(link) for link in links if os.path.lexists(link))

with open("/proc/self/environ") as file:
    assert "RONDE_JOB_KEY=" not in file.read() and "RONDE_JOB_KEY" not in os.environ
assert shown()
for _ in range(2):
    ronde.init()
    assert not shown()
    total = int(ronde.world().allreduce(numpy.array([1]))[0])
    ronde.shutdown()
sys.stdout.write(f"total {total} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""


@pytest.mark.slow
def test_workers_get_it_by_descriptor_also_from_a_template(tmp_path: Path) -> None:
    """The user's variable does not reach workers either, and the descriptor is closed once ranks have met."""
    (tmp_path / "worker.py").write_text(WORKER)
    options = ["--job-key-by-descriptor", "--max-restarts", "1", "-n", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "ronde", "run", *options, "worker.py"],
        cwd=tmp_path,
        env={**os.environ, "RONDE_JOB_KEY": "11" * 32},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[1::2] == ["[0] total 2 attempt 1", "[1] total 2 attempt 1"]


def test_a_name_that_stands_for_the_key_is_warned_of_once() -> None:
    """Ranks started by hand have no launcher that warns."""
    port = str(free_port("127.0.0.1"))
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "RONDE_INSECURE_JOB_KEY": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "import ronde; ronde.init(); ronde.world().barrier()"],
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in started]
    assert [rank.returncode for rank in started] == [0, 0], said
    assert [text.count("the job's name is its key") for text in said] == [1, 0], said
