"""Which of two states counts where a store has lost its memory."""

from __future__ import annotations

from dataclasses import replace

from ronde.rendezvous.membership import Budget
from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import JobPhase, JobState, JobTerms

RUNNING = JobState(
    JobTerms.of(Rules(1, 4), Budget(0)), "a", term=5, version=18, phase=JobPhase.RUNNING, number=5
)
ENDED = replace(RUNNING, version=19, phase=JobPhase.FORMING, number=6)


def test_a_frozen_node_does_not_undo_the_end_of_a_round_by_writing_often() -> None:
    """The leader was lost with the store, and the one that was frozen is the first to find the new one."""
    written_again = replace(RUNNING.restored("b", None), version=30)
    assert ENDED.is_newer(written_again, elsewhere=False)
    assert not written_again.is_newer(ENDED, elsewhere=False)


def test_of_one_round_the_later_version_counts() -> None:
    later = replace(ENDED, version=20, waiting=1)
    assert later.is_newer(ENDED, elsewhere=False)
    assert not ENDED.is_newer(later, elsewhere=False)


def test_a_later_version_that_closes_the_job_counts() -> None:
    closed = replace(ENDED, version=20, phase=JobPhase.CLOSED)
    assert closed.is_newer(ENDED, elsewhere=False)
    assert not ENDED.is_newer(closed, elsewhere=False)
