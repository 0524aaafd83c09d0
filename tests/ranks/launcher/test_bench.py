"""`ronde bench` with real ranks, on one host and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ronde.bench.collective_traffic import OPERATIONS

HANGING_S = 120  # when a test is given up; nothing here takes that long


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ronde bench` for as short as possible, with ranks that have small arrays."""
    return subprocess.run(
        [sys.executable, "-m", "ronde", "bench", "--seconds", "0.1", "--largest", "64KiB", *words],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )


def test_one_rank_has_nothing_to_measure() -> None:
    done = bench("-n", "1")
    assert done.returncode == 2
    assert "ronde bench: one rank has no other to communicate with: start two or more" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "hosts"), [("auto", 1), ("tcp", 2)]
)  # by TCP each rank counts as a host
def test_measures_operations_beside_what_they_should_take(transport: str, hosts: int) -> None:
    done = bench("--json", RONDE_TRANSPORT=transport)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(done.stdout)
    assert (results["hosts"], results["ranks_per_host"]) == (hosts, 2 // hosts)
    # What comes too late on a busy machine is skipped, and named.
    skipped = {name.split(" ")[0] for name in results["skipped"]}
    assert {call["operation"] for call in results["calls"]} | skipped == set(OPERATIONS)
    for call in results["calls"]:
        assert min(call["seconds"], call["expected_seconds"], call["share_of_limit"]) > 0, call
    assert all(len(trial["seconds"]) == len(trial["usual_seconds"]) == 2 for trial in results["trials"])


@pytest.mark.slow
def test_prints_a_table_for_people() -> None:
    done = bench("-n", "2")
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first == "2 ranks on 1 host"
    assert last == "`ronde doctor` says what holds this machine back."
