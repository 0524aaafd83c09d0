"""Trainings with losses come to the bits of one without, and account for each sample. `python -m tests.soak.chaos`.

The named tests are complaints about elastic training elsewhere, each with its own schedule.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import pytest
from tests.soak.chaos import Result, Shape, run_chaos, run_seed
from tests.soak.chaos_training import Fault, Training

LIMIT_S = 240.0  # against hanging
THREE = Shape(3, 1)
LOSSES = int(os.environ.get("CHAOS_LOSSES", "3"))  # 10 by night


@pytest.fixture(autouse=True)
def job_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_JOB_KEY", os.urandom(32).hex())


def suffer(faults: Sequence[Fault], shape: Shape = THREE, steps: int = 40, feed: str = "state") -> Result:
    """Run one training; nothing may be wrong."""
    result = run_chaos(Training(1, steps, feed=feed), faults, shape, LIMIT_S)
    assert not result.wrong, result.wrong
    assert sum(result.report["struck"].values()) >= len(faults), result.report
    return result


@pytest.mark.slow
def test_random_faults_leave_the_bits_of_an_undisturbed_training() -> None:
    asked = argparse.Namespace(nodes=1, faults=4, feed="own", step=0.005, limit=LIMIT_S, plot=None)
    result = run_seed(2, asked)
    assert not result.wrong, result.wrong


@pytest.mark.slow
def test_losses_and_returns_leave_the_bits() -> None:
    # Few, because an agent waits longer and longer before it replaces workers that die within 10 s.
    faults = [Fault(4 + 4 * number, "kill", "during", (number % 3,), 0.001) for number in range(LOSSES)]
    result = suffer([*faults, Fault(5 * LOSSES, "stop", "before", (2,), 0.1)], Shape(3, 2), steps=8 * LOSSES)
    assert result.report["worlds"] > LOSSES


@pytest.mark.slow
def test_no_survivor_is_a_batch_ahead_at_the_end_of_the_data() -> None:
    suffer([Fault(39, "kill", "after", (1,))])
    suffer([Fault(39, "kill", "save", (0,))])


@pytest.mark.slow
def test_survivors_may_die_too() -> None:
    suffer(
        [
            Fault(5, "kill", "before", (2,)),
            Fault(5, "kill", "restore", (1,)),
            Fault(15, "kill", "before", (0,)),
            Fault(15, "kill", "sync", (0,)),
        ]
    )


@pytest.mark.slow
def test_a_grown_world_is_in_the_right_epoch() -> None:
    # 12 steps are an epoch: the process that comes later begins in the second one. The stop waits for it.
    faults = [Fault(13, "kill", "before", (0,)), Fault(16, "stop", "before", (1,), 0.1)]
    result = suffer(faults, Shape(2, 1))
    assert result.report["worlds"] >= 3


@pytest.mark.slow
def test_recoveries_are_flat_in_memory_and_descriptors() -> None:
    # Rank 0 survives all; the account compares what it uses in its first and last worlds.
    faults = [Fault(3 + 2 * number, "kill", "before", (rank,)) for number, rank in enumerate(range(7, 0, -1))]
    result = suffer(faults, Shape(8, 1), steps=30)
    assert result.report["worlds"] >= 8


@pytest.mark.slow
def test_samples_in_a_commit_that_fails_are_not_lost() -> None:
    suffer([Fault(step, "kill", "save", (step % 3,)) for step in (3, 12, 13, 20)], Shape(3, 2))
