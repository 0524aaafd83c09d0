"""Real processes train, die and come: survivors keep their processes, and each sample counts once.

The test plays their agent (`tests/ranks/elastic/agent.py`).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.ranks.elastic.agent import HANG_S, Agent

TRAIN = str(Path(__file__).parent / "programs" / "train.py")
STEPS = 100
RUN = (sys.executable, "-m", "ronde", "run")


def training(size: int, replaces: bool = False, steps: int = STEPS, hold: Path = Path("/")) -> Agent:
    """Return the agent of a training. `hold`: it waits in the middle until this file exists."""
    variables = {"SAMPLES": str(12 * steps), "RONDE_LOG_LEVEL": "error", "HOLD": str(hold)}
    return Agent([TRAIN], size, replaces, variables)


def sizes(agent: Agent) -> dict[int, set[int]]:
    """Return the sizes of the worlds in which each living worker has made a step."""
    found: dict[int, set[int]] = {number: set() for number in agent.members}
    for line in agent.lines:
        if line.worker in found and "size" in line.value:
            found[line.worker].add(line.value["size"])
    return found


def run_until_size(agent: Agent, size: int) -> None:
    """Wait until all members train in a world of this size."""

    def is_there() -> bool:
        return len(agent.members) == size and all(size in each for each in sizes(agent).values())

    agent.run(is_there)
    assert agent.workers, "the training ended too early"


def results(agent: Agent) -> list[dict[str, Any]]:
    return [line.value for line in agent.lines if "done" in line.value]


def check_results(agent: Agent) -> list[dict[str, Any]]:
    """Check that all members have ended well, with the same state, in which each sample counts once."""
    found = results(agent)
    assert found
    assert {tuple(each["counts"]) for each in found} == {(1.0,)}
    assert len({each["weights"] for each in found}) == 1
    assert all(agent.codes[number] == 0 for number in agent.members)
    return found


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of a run in one process, without losses."""
    with training(1) as agent:
        agent.run()
        [result] = check_results(agent)
        weights: str = result["weights"]
        return weights


def test_survivors_go_on_with_the_bits_of_an_undisturbed_run(undisturbed: str, tmp_path: Path) -> None:
    with training(3, hold=tmp_path / "on") as agent:
        run_until_size(agent, 3)
        agent.kill(1)
        run_until_size(agent, 2)
        agent.kill(0)
        run_until_size(agent, 1)
        (tmp_path / "on").touch()
        agent.run()
        [result] = check_results(agent)
        assert result["weights"] == undisturbed
        assert result["recoveries"] == 2
        assert result["pid"] == agent.of(2)[0]["pid"], "the process has stayed"
        assert result["lost"] <= 2, "at most the step of each loss"


def test_new_ranks_get_the_state_and_no_step_is_lost(undisturbed: str, tmp_path: Path) -> None:
    with training(1, hold=tmp_path / "on") as agent:
        run_until_size(agent, 1)
        agent.add(2)
        run_until_size(agent, 3)
        agent.remove(0)
        run_until_size(agent, 2)
        agent.kill(0)  # as its agent does
        (tmp_path / "on").touch()
        agent.run()
        found = check_results(agent)
        assert [each["weights"] for each in found] == [undisturbed] * 2
        assert [each["lost"] for each in found] == [0, 0]


def test_a_dead_rank_is_replaced(undisturbed: str, tmp_path: Path) -> None:
    with training(2, replaces=True, hold=tmp_path / "on") as agent:
        run_until_size(agent, 2)
        agent.kill(0)
        agent.run(lambda: agent.members == [1])
        run_until_size(agent, 2)
        (tmp_path / "on").touch()
        agent.run()
        assert {each["weights"] for each in check_results(agent)} == {undisturbed}


@pytest.mark.slow
def test_two_die_at_once(tmp_path: Path) -> None:
    with training(4, hold=tmp_path / "on") as agent:
        run_until_size(agent, 4)
        agent.kill(3)
        agent.kill(0)
        run_until_size(agent, 2)
        (tmp_path / "on").touch()
        agent.run()
        assert len(check_results(agent)) == 2


@pytest.mark.slow
def test_losses_and_returns_at_random_moments(undisturbed: str, tmp_path: Path) -> None:
    """Ten losses and ten returns, also while others recover: the bits of an undisturbed run."""
    chance = random.Random(7)
    with training(3, replaces=True, hold=tmp_path / "on") as agent:
        for _ in range(10):
            agent.run(lambda: len(agent.members) == 3)
            agent.wait(chance.choice((0.001, 0.02, 0.1)))
            if chance.random() < 0.5:
                run_until_size(agent, 3)
            agent.kill(chance.choice(agent.members))
            if chance.random() < 0.3:
                agent.wait(chance.choice((0.001, 0.02)))
                agent.kill(chance.choice(agent.members))
            agent.run(lambda: len(agent.members) < 3)
        run_until_size(agent, 3)
        (tmp_path / "on").touch()
        agent.run()
        assert {each["weights"] for each in check_results(agent)} == {undisturbed}


@pytest.mark.slow
def test_memory_and_descriptors_are_flat_over_many_recoveries(tmp_path: Path) -> None:
    """The first rank outlives a hundred others."""
    with training(2, replaces=True, hold=tmp_path / "on") as agent:
        before: dict[str, int] = {}
        for count in range(15):
            run_until_size(agent, 2)
            agent.lines.clear()
            agent.kill(agent.members[-1])
            agent.run(lambda: any("size" in each for each in agent.of(0)))
            after = agent.of(0)[-1]
            if count == 4:
                before = after
        assert after["descriptors"] <= before["descriptors"] + 1
        assert after["memory_kb"] <= before["memory_kb"] + 3000


@pytest.mark.slow
def test_ranks_take_over_the_streams_of_others(tmp_path: Path) -> None:
    """Three ranks, two after a loss within a step, and three again: each sample of each stream counts once."""
    program = str(Path(TRAIN).with_name("streams.py"))
    words = [program, str(tmp_path / "died"), str(tmp_path / "on")]
    with Agent(words, 3, environment={"RONDE_LOG_LEVEL": "error"}) as agent:
        run_until_size(agent, 2)
        agent.add()
        run_until_size(agent, 3)
        (tmp_path / "on").touch()
        agent.run()
        found = {line.worker: line.value for line in agent.lines if "done" in line.value}
    assert sorted(found) == [0, 2, 3]
    for each in found.values():
        assert each["done"] == 24
        assert set(each["counts"]) == {1.0}
        assert each["lost"] <= 1
    assert any(start > 0 for _, start in found[3]["opened"]), "the new rank goes on in the middle of a stream"


def test_what_belongs_to_a_lost_world_raises_and_arrays_stay() -> None:
    program = str(Path(TRAIN).with_name("held.py"))
    with Agent([program], 4, environment={"RONDE_LOG_LEVEL": "error"}) as agent:
        agent.run(lambda: sum("holds" in line.value for line in agent.lines) == 4)
        agent.kill(1)
        agent.run()
        found = {line.worker: line.value for line in agent.lines if "errors" in line.value}
    for rank, worker in enumerate((0, 2, 3)):
        assert agent.codes[worker] == 0
        number = worker + 1.0
        assert found[worker]["values"] == [1000 * number, number + 1, number + 1]
        assert found[worker]["sums"] == [2 if rank < 2 else 0, 6, 3]
        errors = found[worker]["errors"]
        assert {errors.pop(name) for name in ("world", "group", "set")} == {"UsageError"}
        # The rank that was lost, or the abort with which this process left the world, whichever came first.
        assert set(errors) == {"handle", "later handle"}
        assert set(errors.values()) <= {"PeerLostError", "AbortedError"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--min-np", "2"], ["--spares", "1"]], ids=["smaller", "with a spare"])
def test_under_ronde_run(options: list[str], undisturbed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ronde", "run", "-n", "3", *options, "--max-restarts", "3", TRAIN]
    variables = {
        "SAMPLES": str(12 * STEPS),
        "DIES": str(tmp_path / "died"),
        "RONDE_TIMELINE": f"{tmp_path}/traces/",
    }
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()]
    ends = [each for each in found if "done" in each]
    assert {each["weights"] for each in ends} == {undisturbed}
    assert {tuple(each["counts"]) for each in ends} == {(1.0,)}
    assert max(each["recoveries"] for each in ends) == 1
    assert len({each["pid"] for each in found if "rank" in each} & {each["pid"] for each in ends}) >= 2
    assert re.search(r"killed by SIGKILL.*ranks go on from commit \d+.*steps lost: [01]", done.stderr), (
        done.stderr
    )
    ticks = [
        record
        for path in (tmp_path / "traces").glob("rank-*.round-*.json")
        for record in json.loads(path.read_text())
        if "on from commit" in record["name"] and record["args"]["is_loss"]
    ]
    assert len(ticks) == 2, "one on each rank that goes on in place"
    assert len({(tick["args"]["commit"], tick["args"]["reason"]) for tick in ticks}) == 1
    assert "killed by SIGKILL" in ticks[0]["args"]["reason"]
    assert all(tick["args"]["milliseconds"] > 0 for tick in ticks)


@pytest.mark.parametrize(
    "words", [[], pytest.param(["sharded"], marks=pytest.mark.slow)], ids=["plain", "sharded"]
)
def test_reset_callbacks_and_a_second_loss_leave_the_same_state_on_all_ranks(words: list[str]) -> None:
    program = str(Path(TRAIN).with_name("resets.py"))
    with Agent([program, *words], 4, environment={"RONDE_LOG_LEVEL": "error"}) as agent:
        agent.run()
        found = [line.value for line in agent.lines]
        assert len(found) == 2
        for each in found:
            assert each["step"] == 10
            assert each["called"] in ([2], [3, 2]), "once for each world"
            assert each["sizes"] == found[0]["sizes"]
            assert each["sizes"] in ([2], [3, 2])
            if words:
                assert each["share"] == [10 + 100 * len(each["sizes"])] * 6


@pytest.mark.parametrize("words", [[], ["callback"]], ids=["plain", "with a reset callback"])
def test_an_error_that_recurs_without_a_loss_ends_the_training(words: list[str]) -> None:
    program = str(Path(__file__).parent / "programs" / "recurring.py")
    options = ["-n", "2", "--min-np", "1", "--max-restarts", "1"]
    command = [sys.executable, "-m", "ronde", "run", *options, program, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1
    recoveries = done.stderr.count("2 ranks go on from commit ")
    assert 4 <= recoveries <= 4 * 4, "four in each start of a process"
    assert "TimeoutError: this step is too slow" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", [("in_barrier", "0.5"), ("after", "0")])
def test_a_rank_that_dies_at_the_end_costs_the_others_nothing(case: tuple[str, str], tmp_path: Path) -> None:
    command = [*RUN, "-n", "3", "--min-np", "2", str(Path(TRAIN).with_name("dies_last.py")), *case]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert endings(done.stdout) == ["done 5 0 of 3", "done 5 2 of 3"], done.stderr
    assert "all ranks had finished their training" in done.stderr


@pytest.mark.slow
def test_an_exception_after_the_training_is_not_lost(tmp_path: Path) -> None:
    command = [*RUN, "-n", "3", "--min-np", "2", str(Path(TRAIN).with_name("dies_last.py")), "raises", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 1
    assert endings(done.stdout) == ["done 5 0 of 3", "done 5 2 of 3"], done.stderr
    assert "(OSError: the disk is full); all ranks had finished their training" in done.stderr
    assert "starting" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sizes", "line"),
    [
        (
            ("--min-np", "1", "--spares", "1"),
            ["sizes [2, 1]"],
            "no new process can take part: none is started",
        ),
        ((), ["sizes [2, 2]", "sizes [2, 2]"], "no new process can take part: all workers start again"),
    ],
)
def test_no_new_process_takes_part_in_a_second_training(
    options: tuple[str, ...], sizes: list[str], line: str, tmp_path: Path
) -> None:
    program = str(Path(TRAIN).with_name("two_trainings.py"))
    command = [*RUN, "-n", "2", "--max-restarts", "1", *options, program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert endings(done.stdout) == sizes, done.stderr
    assert line in done.stderr


@pytest.mark.slow
def test_ranks_of_another_node_learn_that_all_have_finished(tmp_path: Path) -> None:
    """Rank 2 alone has not passed the last barrier when rank 1 dies; no rank trains, or ends, a second time."""
    meeting = [
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port('127.0.0.1')}",
        "--nnodes",
        "2",
        "--max-restarts",
        "3",
    ]
    variables = {**os.environ, "RONDE_JOB_KEY": "5" * 64}
    program = [str(Path(TRAIN).with_name("dies_last.py")), "in_barrier", "1"]
    commands = [
        [*RUN, *meeting, "--node-rank", str(node), "-n", str(workers), *program]
        for node, workers in enumerate((2, 1))
    ]
    jobs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=tmp_path
        )
        for command in commands
    ]
    ends = [job.communicate(timeout=HANG_S) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], ends
    assert endings("".join(out for out, _ in ends)) == ["done 5 0 of 3", "done 5 2 of 3"], ends
    assert not any("starting" in err or "in place" in err for _, err in ends), ends


def endings(output: str) -> list[str]:
    """Return the last lines of the ranks, in the order of the ranks."""
    return sorted(line.partition("] ")[2] for line in output.splitlines())
