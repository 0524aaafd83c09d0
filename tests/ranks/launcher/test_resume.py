"""A killed job resumes from its last checkpoint, and one that has to leave repeats nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.ranks.launcher.test_launcher import Launcher, end
from tests.ranks.pages import runs

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume_torch.py"


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ronde", "run", *options, str(EXAMPLE), "--checkpoints", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(job: subprocess.Popen[str], text: str) -> str:
    assert job.stdout
    output = ""
    while text not in output:
        line = job.stdout.readline()
        assert line, output
        output += line
    return output


def rest(job: subprocess.Popen[str]) -> str:
    output, _ = job.communicate()
    return output


def process_of_rank_1(folder: Path) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = str(folder).encode() in (process / "cmdline").read_bytes()
            if is_ours and b"\0RANK=1\0" in b"\0" + (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError("rank 1 does not run")


def saved(output: str) -> list[int]:
    return [int(samples) for samples in re.findall(r"saved after (\d+) samples", output)]


def resumed(output: str) -> list[int]:
    return [int(samples) for samples in re.findall(r"going on after (\d+) samples", output)]


def test_a_killed_worker_costs_the_samples_since_the_last_checkpoint(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2", "--max-restarts", "1") as job:
        before = read_until(job, "saved after 12800 ")
        os.kill(process_of_rank_1(tmp_path), signal.SIGKILL)
        after = rest(job)
    assert job.returncode == 0, after
    (again,) = resumed(after)
    assert again in saved(before + after)
    # Each once: nothing was done again from the start.
    assert saved(before + after) == list(range(6_400, 76_801, 6_400))
    accuracy = re.search(r"held-out accuracy: (\S+)", after)
    assert accuracy
    assert float(accuracy[1]) > 0.95


def test_a_job_that_gets_sigterm_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    with start(tmp_path, "-n", "2") as job:
        before = read_until(job, "saved after 6400 ")
        job.send_signal(signal.SIGTERM)
        before += rest(job)
    assert job.returncode == 128 + signal.SIGTERM, before
    assert saved(before)[-1] % 6_400, before  # at once, not at the next multiple
    with start(tmp_path, "-n", "3") as job:
        after = rest(job)
    assert job.returncode == 0, after
    assert resumed(after)[0] == saved(before)[-1]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_node_that_leaves_repeats_no_sample(launcher: Launcher, leaver: int) -> None:
    """The program of docs/checkpoints.md in two agents, one of which gets SIGTERM."""
    (program,) = (run.program for run in runs("docs/checkpoints.md") if "SIGTERM" in run.program)
    program = program.replace("SAMPLES = 20_000", "SAMPLES = 32_000")
    # Each step of each rank leaves a file that names its first sample; a repeated one fails.
    write = 'open(f"step-{hvd.size()}-{first}", "x").close()'
    program = program.replace("    before, seen =", f"    {write}\n    before, seen =")
    (launcher.folder / "train.py").write_text(program)
    meeting = ["--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{free_port('127.0.0.1')}"]
    words = ["-n", "1", "--nnodes", "1:2", "--rdzv-id", "job", *meeting, "train.py"]
    agents = [launcher.start("--rdzv-conf", f"is_host={host}", *words) for host in ("true", "false")]
    while len(list(launcher.folder.glob("step-2-*"))) < 100:
        assert [agent.poll() for agent in agents] == [None, None]
        time.sleep(0.05)
    agents[leaver].send_signal(signal.SIGTERM)
    ends = [end(agent) for agent in agents]
    assert ends[1 - leaver][0] == 0, ends
    assert ends[leaver][0] == 128 + signal.SIGTERM, ends
    steps = sorted(int(path.name.split("-")[2]) for path in launcher.folder.glob("step-*"))
    assert steps[0] == 0
    assert {second - first for first, second in zip(steps, steps[1:])} == {
        32
    }  # each batch of 32 samples once
    assert steps[-1] + 32 >= 32_000
