"""Commits over losses, changes and new ranks, simulated; and mistakes of the protocol, which the simulation notices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.sim.elastic_commits import BrokenError, Bugs, Training

from ronde.elastic.commit_protocol import NOTHING, Action, Decision, Standing, decide

SEEDS = 300


def test_all_ranks_have_the_state_of_one_commit_after_each_recovery() -> None:
    recoveries = 0
    for seed in range(SEEDS):
        training = Training(seed, size=2 + seed % 5)
        training.run(steps=12)
        recoveries += training.recoveries
        assert all(
            rank.live == rank.step or rank.standing.copied >= 12 for rank in training.ranks if rank.live >= 0
        )
    assert recoveries > SEEDS


def oldest(standings: Sequence[Standing]) -> Decision:
    """Go back to the oldest copy."""
    number = min(each.copied for each in standings)
    return Decision(number, (Action.RESTORE,) * len(standings), (0,))


def of_rank_0(standings: Sequence[Standing]) -> Decision:
    """Take rank 0's state, as Horovod does."""
    right = decide(standings)
    number = max(standings[0].copied, 0)
    actions = (right.actions[0], *(Action.RECEIVE for _ in standings[1:]))
    return Decision(number, actions, (0,))


def trusting_one(standings: Sequence[Standing]) -> Decision:
    """Advance if one survivor stands at the next commit."""
    right = decide(standings)
    if right.actions[0] is Action.BEGIN or all(each.point <= right.number for each in standings):
        return right
    number = right.number + 1
    actions = tuple(Action.SAVE if each != Standing() else Action.RECEIVE for each in standings)
    return Decision(number, actions, tuple(rank for rank, each in enumerate(actions) if each is Action.SAVE))


@pytest.mark.parametrize(
    "bugs",
    [
        Bugs(copies_before_barrier=True, decide=oldest),
        Bugs(keeps_point=True, decide=trusting_one),
        Bugs(decide=oldest),
        Bugs(decide=of_rank_0),
        Bugs(decide=trusting_one),
    ],
    ids=["copy first", "stale point", "oldest copy", "rank 0", "trusts one"],
)
def test_mistakes_are_noticed(bugs: Bugs) -> None:
    def train() -> None:
        for seed in range(SEEDS):
            Training(seed, size=2 + seed % 5, bugs=bugs).run(steps=12)

    with pytest.raises(BrokenError):
        train()


def test_without_points_the_newest_copy_travels() -> None:
    """The protocol survives ranks that have lost what they stood at."""
    for seed in range(SEEDS):
        Training(seed, size=3, bugs=Bugs(forgets_point=True)).run(steps=8)


@pytest.mark.parametrize(
    ("standings", "number", "actions"),
    [
        ([Standing(4), Standing(4)], 4, [Action.RESTORE] * 2),
        ([Standing(4), Standing(3, 4)], 4, [Action.RESTORE, Action.SAVE]),
        ([Standing(3, 4), Standing(3, 4)], 4, [Action.SAVE] * 2),
        ([Standing(3, 4, False), Standing(3, 4, False)], 3, [Action.RESTORE] * 2),
        ([Standing(3, 4), Standing(3)], 3, [Action.RESTORE] * 2),
        ([Standing(), Standing(4), Standing(3, 4)], 4, [Action.RECEIVE, Action.RESTORE, Action.SAVE]),
        ([Standing(), Standing()], 0, [Action.BEGIN] * 2),
        ([Standing(3, 4), Standing()], 4, [Action.SAVE, Action.RECEIVE]),
        ([Standing(NOTHING, 0), Standing(NOTHING, 0)], 0, [Action.SAVE] * 2),
    ],
)
def test_decisions(standings: list[Standing], number: int, actions: list[Action]) -> None:
    decision = decide(standings)
    assert (decision.number, list(decision.actions)) == (number, actions)
