from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ronde.elastic import running
from ronde.elastic.commit_protocol import Action, Decision
from ronde.elastic.goodput import Ledger
from ronde.elastic.state import State
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
