"""A rank whose state is wrong, and a rank that is stuck, among real processes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ranks.elastic.check_programs import compute_wrongly, differ_rightly, end_early, get_stuck

from ronde.testing import ranks


def test_a_rank_that_differs_is_named_and_put_right() -> None:
    found = ranks.run(compute_wrongly, 3, {3: (1,)})
    assert [weights for weights, _ in found] == [np.full(100_000, 6.0).tobytes()] * 3
    told = "the state of rank 1 on .* differs from that of most ranks at commit 4 (in model): it goes back to"
    lines = [line for _, lines in found for line in lines]
    assert len(lines) == 1
    assert told.partition(" on ")[0] in lines[0]
    assert told.partition("differs")[2] in lines[0]


def test_a_part_that_may_differ_is_not_compared() -> None:
    for lines in ranks.run(differ_rightly, 3):
        assert lines == []


def test_a_rank_that_differs_again_leaves() -> None:
    found = ranks.run(compute_wrongly, 3, {1: (2,), 5: (2,)})
    name, text, _ = found[2]
    assert name == "MismatchError"
    assert "the state of rank 2 on" in text
    assert "differs from that of most ranks at commit 6 (in model), again after 1 repairs" in text


def test_two_ranks_that_differ_have_no_majority() -> None:
    for name, text, _ in ranks.run(compute_wrongly, 2, {2: (0,)}):
        assert name == "MismatchError"
        assert "no majority agrees: ranks 0; ranks 1" in text


@pytest.mark.parametrize("waits_in_engine", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_rank_that_is_stuck_ends_and_no_other(
    waits_in_engine: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with ranks.start(get_stuck, 3, 1, waits_in_engine) as job:
        outcomes = job.outcomes()
    assert [each.error is None for each in outcomes] == [True, False, True]
    assert "exited with code 1" in outcomes[1].traceback_text
    for each in (outcomes[0], outcomes[2]):
        assert "rank 1" in each.value
    told = capfd.readouterr().err
    assert told.count("is stuck: its step takes") == 1
    assert "ronde: rank 1 is stuck" in told
    assert "in get_stuck_here" in told


def test_the_end_of_one_rank_is_not_taken_for_a_commit() -> None:
    for text in ranks.run(end_early, 3):
        assert "rank 0 has returned from the training function before commit 1" in text
        assert "ranks 1, 2 make commit 1" in text
