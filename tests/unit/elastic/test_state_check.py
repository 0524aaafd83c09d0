"""Which rank differs from most."""

from __future__ import annotations

from ronde.elastic.state_check import StateReport, judge


def reports(*digests: str, repairs: dict[int, int] | None = None) -> list[StateReport]:
    """One letter for each part."""
    return [StateReport(tuple(each), (repairs or {}).get(rank, 0)) for rank, each in enumerate(digests)]


def test_equal_states_are_no_judgement() -> None:
    assert judge(reports("ab", "ab", "ab")).all_equal


def test_the_rank_that_differs_gets_the_state_of_most() -> None:
    found = judge(reports("xb", "ab", "ab"))
    assert (found.source, found.repaired, found.expelled, found.parts) == (1, (0,), (), (0,))


def test_who_differs_again_leaves() -> None:
    found = judge(reports("ab", "ab", "ab", "ay", "xb", repairs={3: 1}))
    assert (found.source, found.repaired, found.expelled, found.parts) == (0, (4,), (3,), (0, 1))


def test_half_of_the_ranks_are_no_majority() -> None:
    for digests in (("a", "b"), ("a", "a", "b", "b"), ("a", "b", "c")):
        found = judge(reports(*digests))
        assert (found.source, found.repaired, found.parts) == (None, (), (0,))
