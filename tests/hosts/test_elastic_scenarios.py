"""The scenarios of Horovod's own tests of elastic jobs, with hosts and real agents: see its elastic_common.py.

Hosts that a script adds and removes, a rank that dies or raises, all that raise, a limit of changes, too few hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.hosts import ssh
from tests.hosts.ssh_jobs import RunningJob, World, make_world, wait_for
from tests.hosts.test_ssh_links import offer

pytestmark = [
    pytest.mark.skipif(bool(ssh.require()), reason=ssh.require()),
    pytest.mark.slow,
]

# Three batches of an epoch; rank 0 says where it is. FAILS: the ranks, of their start, that fail in epoch 1, and how.
PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import ronde, ronde.elastic

hold, fails, how = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
ronde.init()
start_rank = ronde.rank()

def fail(state):
    if state.epoch == 1 and state.batch == 0 and start_rank in fails:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"rank {start_rank} fails")

@ronde.elastic.run
def train(state):
    state.rounds += 1
    while state.epoch < 3:
        while state.batch < 3:
            fail(state)
            total = ronde.allreduce(np.ones(1), op=ronde.Sum, name="total")
            assert total[0] == ronde.size()
            state.batch += 1
            state.commit()
        if ronde.rank() == 0:
            line = {"epoch": state.epoch, "size": ronde.size(), "start": start_rank, "rounds": state.rounds}
            print(json.dumps(line), flush=True)
        while not os.path.exists(f"{hold}/epoch-{state.epoch}"):
            time.sleep(0.02)
            state.check_host_updates()
        state.epoch, state.batch = state.epoch + 1, 0
        state.commit()

train(ronde.elastic.ObjectState(epoch=0, batch=0, rounds=0))
"""


@pytest.fixture
def world() -> Iterator[World]:
    with make_world(2) as made:
        made.program.write_text(PROGRAM)
        yield made
        wait_for(made.is_empty)


def start(world: World, *options: str, fails: str = "[]", how: str = "exception") -> RunningJob:
    return world.start("--prefix", "", *options, str(world.program), str(world.folder), fails, how)


def let_go(world: World, *epochs: int) -> None:
    for epoch in epochs:
        (world.folder / f"epoch-{epoch}").touch()


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in out.splitlines() if "{" in line]


def found(world: World) -> tuple[str, ...]:
    script = world.folder / "find.sh"
    script.write_text(f"#!/bin/sh\ncat {world.folder}/there\n")
    script.chmod(0o755)
    return ("--host-discovery-script", str(script))


def test_hosts_added_and_removed(world: World) -> None:
    offer(world, 0)
    with start(world, *found(world), "-n", "1", "--min-np", "1", "--max-np", "2") as job:
        job.says('"epoch": 0, "size": 1')
        offer(world, 0, 1)
        let_go(world, 0)
        job.says('"epoch": 1, "size": 2')
        offer(world, 1)
        let_go(world, 1)
        job.says('"epoch": 2, "size": 1')
        let_go(world, 2)
        code, out, err = job.end()
    assert code == 0, err
    last = lines(out)[-1]
    assert (last["epoch"], last["start"]) == (2, 1), "the rank that came has the state of the one that left"


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_a_single_rank_fails(world: World, how: str) -> None:
    """The others go on, with the rank that has not failed as rank 0, at the epoch that they had."""
    let_go(world, 0, 1, 2)
    hosts = world.listed(0, 1)
    with start(world, "-H", hosts, "-n", "2", "--min-np", "1", fails="[0]", how=how) as job:
        code, out, err = job.end()
    assert code == 0, err
    of_epochs = [(each["epoch"], each["size"], each["start"]) for each in lines(out)]
    assert of_epochs[0] == (0, 2, 0)
    assert of_epochs[-1][0] == 2
    assert of_epochs[1][1:] == (1, 1)


def test_all_ranks_fail(world: World) -> None:
    let_go(world, 0, 1, 2)
    with start(world, "-H", world.listed(0, 1), "-n", "2", "--min-np", "1", fails="[0, 1]") as job:
        code, out, _ = job.end()
    assert code != 0
    assert {each["epoch"] for each in lines(out)} == {0}


def test_the_limit_of_changes(world: World) -> None:
    offer(world, 0)
    options = (*found(world), "-n", "1", "--min-np", "1", "--max-np", "2", "--reset-limit", "1")
    with start(world, *options) as job:
        job.says('"epoch": 0, "size": 1')
        offer(world, 0, 1)
        let_go(world, 0)
        job.says('"epoch": 1, "size": 2')
        offer(world, 1)
        code, _, err = job.end()
    assert code != 0
    assert "the limit of changes of the nodes (--reset-limit) is 1" in err


def test_too_few_hosts_for_too_long(world: World) -> None:
    let_go(world, 0, 1, 2)
    options = ("-H", world.listed(0, 1), "-n", "2", "--min-np", "2", "--elastic-timeout", "2")
    with start(world, *options, fails="[0]") as job:
        code, out, err = job.end()
    assert code != 0
    assert [each["epoch"] for each in lines(out)] == [0]
    assert "rank 0" in err
