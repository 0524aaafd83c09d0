"""How a backend waits for an operation: at first without pauses, later with short ones."""

from __future__ import annotations

from itertools import count

import pytest

from ronde.backends import BackendContext, Patience

SECOND = 10**9


def pauses_of(monkeypatch: pytest.MonkeyPatch, *spin_ns: int) -> list[int]:
    """Return the times since the beginning, in tenths of a second, at which a wait of three seconds pauses."""
    now, pauses = [0], []
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    monkeypatch.setattr("os.sched_yield", lambda: None)
    monkeypatch.setattr("time.sleep", lambda _seconds: pauses.append(now[0] * 10 // SECOND))
    place = BackendContext(0, 1, (0,), ("here",), 0, "", "", None, 0, 0, lambda: False)
    turns = count()

    def is_done() -> bool:
        now[0] = next(turns) * SECOND // 10
        return now[0] >= 3 * SECOND

    Patience(place, "allreduce").wait_until(is_done, *spin_ns)
    return pauses


def test_the_first_two_seconds_pass_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses_of(monkeypatch) == list(range(20, 30))


def test_a_backend_sets_how_long_it_asks_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses_of(monkeypatch, SECOND) == list(range(10, 30))
