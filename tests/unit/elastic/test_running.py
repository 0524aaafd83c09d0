from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ronde.elastic import running, state
from ronde.elastic.commit_protocol import Action, Decision, Standing
from ronde.elastic.goodput import Ledger
from ronde.elastic.state import State, TrainingOverError, comm_standings
from ronde.engine import process


class Beginning:
    """A state that begins, as far as `_begin` needs one."""

    commit_number = 0

    def agree(self) -> tuple[Decision, bool]:
        return Decision(0, (Action.BEGIN,) * 2, (0,)), False

    def __getattr__(self, name: str) -> Any:
        return lambda: None


def test_a_beginning_that_a_loss_interrupts_costs_no_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, facts = Ledger(0), list[dict[str, object]]()
    monkeypatch.setattr(running, "ledger", ledger)
    monkeypatch.setattr(running, "comm", SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    monkeypatch.setattr(process, "note_in_timeline", lambda track, text, found: facts.append(found))
    run = running._Run(cast(State, Beginning()), lambda: None)
    run._note(running._Interruption("rank 2 was lost", True, False))
    run._begin()
    found = ledger.read(time.monotonic_ns())
    assert (found.recoveries, found.lost_ns, found.recovering_ns, found.steps_lost) == (0, 0, 0, 0)
    run._note(running._Interruption("rank 3 was lost", True, False))
    run._begin()
    assert ledger.read(time.monotonic_ns()).recoveries == 1
    assert [(each["reason"], each["commit"], each["ranks"]) for each in facts] == [
        ("rank 2 was lost", 0, 2),
        ("rank 3 was lost", 0, 2),
    ]


class Meeting:
    """A world of two ranks: this one, and one that comes in these trainings, one after the other."""

    def __init__(self, *others: int) -> None:
        self.others = list(others)

    def allgather(self, row: np.ndarray) -> np.ndarray:
        return np.concatenate([row, [0, 0, 1, 0, self.others.pop(0)]])


def test_a_process_of_an_earlier_training_is_told_and_the_others_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "membership", lambda: SimpleNamespace(training=2))
    meeting = Meeting(1, 2)
    monkeypatch.setattr(state, "comm", SimpleNamespace(rank=lambda: 1, world=lambda: meeting))
    assert comm_standings(Standing(4)) == ([Standing(4), Standing(0, 0)], False)
    assert not meeting.others
    meeting.others = [3]
    with pytest.raises(
        TrainingOverError, match=r"rank 1 on \S+ begins training 2 of this program, .* in training 3"
    ):
        comm_standings(Standing(4))


def test_a_rank_that_has_lost_the_others_in_the_last_barrier_ends_when_they_are_in_the_next_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completed: list[bool] = []
    run = running._Run(cast(State, Beginning()), lambda: None)
    run._membership = cast(Any, SimpleNamespace(announce_completed=lambda: completed.append(True)))

    def join() -> None:
        raise TrainingOverError("the others are in training 2")

    monkeypatch.setattr(run, "_join", join)
    with pytest.raises(TrainingOverError):
        run._train_until_done()
    run._finished_in, run._result = cast(Any, object()), "mine"
    assert run._train_until_done() == "mine"
    assert completed == [True]
