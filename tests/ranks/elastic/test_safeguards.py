"""`ronde run` with states that keep snapshots and shards, and ranks that are lost, stuck, or too few."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.ranks.launcher.test_launcher import Launcher

SCRIPT = """
import glob
import json

import numpy as np

import ronde
import ronde.elastic

every, last, is_sharded, *mishaps = json.loads(sys.argv[1])


class Rows:
    is_sharded = True

    def __init__(self):
        self.live, self.copied = np.zeros(4), None

    def save(self):
        self.copied = self.live.copy()

    def restore(self):
        if self.copied is not None:
            self.live = self.copied.copy()

    def payload(self):
        return self.copied

    def load(self, payload):
        self.copied = payload
        self.restore()


def happens(step):
    '''Return what happens to this rank after a step, once.'''
    for kind, rank, at in mishaps:
        if (rank, at) == (ronde.rank(), step):
            try:
                open(f"{kind}-{rank}-{at}", "x").close()
                return kind
            except FileExistsError:
                pass


state, rows = ronde.elastic.ObjectState(weights=np.zeros(100), step=0), Rows()
if is_sharded:
    state.add_part("rows", rows)
state.keep_snapshots("snapshots", every)
state.end_stuck_steps(least_s=0.5)


@ronde.elastic.run
def train(state):
    print("from", state.step, flush=True)
    if state.step == 0:
        rows.live += 100 * ronde.rank()
    while state.step < last:
        state.weights += ronde.world().allreduce(np.ones(100)) / ronde.size()
        state.step += 1
        rows.live += 1
        match happens(state.step):
            case "lost":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stuck":
                time.sleep(600)
        state.commit()
        if state.step == every:
            while len(glob.glob(f"snapshots/*.step-{every:09}.part-*")) < (1 + ronde.size() if is_sharded else 1):
                time.sleep(0.01)
    return ronde.rank(), state.weights.sum(), rows.live[0]


print("done", *train(state), flush=True)
"""


def run(launcher: Launcher, options: str, *plan: Any) -> tuple[int, list[str], str]:
    """Return the exit code, the sorted lines of all ranks, and standard error."""
    launcher.script(SCRIPT)
    code, out, err = launcher.run(*options.split(), "script.py", json.dumps(plan))
    return code, sorted(line.partition("] ")[2] for line in out.splitlines()), err


def results(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("done")]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--max-restarts 3", "--spares 1"])
def test_a_replacement_gets_the_shard_of_a_lost_rank(launcher: Launcher, options: str) -> None:
    code, lines, err = run(launcher, f"-n 3 {options}", 100, 20, True, ("lost", 1, 10))
    assert code == 0, err
    assert results(lines) == ["done 0 2000.0 20.0", "done 1 2000.0 120.0", "done 2 2000.0 220.0"]
    assert lines.count("from 9") == 3  # the step in which the rank was lost is done again


@pytest.mark.slow
def test_a_rank_and_its_holder_cost_the_steps_since_the_snapshot(launcher: Launcher) -> None:
    code, lines, err = run(launcher, "-n 3 --max-restarts 5", 6, 20, True, ("lost", 1, 10), ("lost", 2, 10))
    assert code == 0, err
    assert results(lines) == ["done 0 2000.0 20.0", "done 1 2000.0 120.0", "done 2 2000.0 220.0"]
    assert "from 6" in lines
    assert "go on from commit 6, 2 of them new," in err


@pytest.mark.slow
def test_too_few_workers_end_the_job_and_it_can_be_resumed_by_others(launcher: Launcher) -> None:
    code, lines, err = run(
        launcher, "-n 3 --min-np 2 --max-restarts 1", 100, 20, False, ("lost", 1, 10), ("lost", 1, 15)
    )
    assert code != 0
    assert not results(lines)
    assert "ronde: Commit 14 is in" in err
    assert "start the job again with the same command to go on from there" in err
    code, lines, err = run(launcher, "-n 1", 100, 20, False)
    assert code == 0, err
    assert lines == ["done 0 2000.0 6.0", "from 14"]


def test_a_job_without_a_commit_in_memory_says_where_it_begins(launcher: Launcher) -> None:
    code, lines, err = run(launcher, "-n 1 --max-restarts 2", 6, 12, False, ("lost", 0, 3), ("lost", 0, 9))
    assert code == 0, err
    assert lines == ["done 0 1200.0 6.0", "from 0", "from 0", "from 6"]
    assert "no process of round 1 has a commit of an earlier round: the training begins from its start" in err
    assert "there is no complete snapshot in" in err
    assert "no process has a commit in memory: the training goes on from commit 6 in" in err


@pytest.mark.slow
def test_a_stuck_rank_is_replaced(launcher: Launcher) -> None:
    code, lines, err = run(launcher, "-n 2 --max-restarts 1", 100, 20, False, ("stuck", 1, 15))
    assert code == 0, err
    assert [line.split()[2] for line in results(lines)] == ["2000.0"] * 2
    assert err.count("is stuck: its step takes") >= 1
    assert "in train" in err
