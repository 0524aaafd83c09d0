"""A few short seeds of the soak, one for each place, which keep the driver working. `python -m tests.soak`."""

from __future__ import annotations

import os

import pytest
from tests.soak.__main__ import has, soak


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "place"), [(5, "agent"), (8, "store"), (9, "file")])
def test_random_faults(seed: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_JOB_KEY", os.urandom(32).hex())
    assert has(place)
    wrong, _ = soak(seed, (place,), ("alone", "ronde"))
    assert not wrong, wrong
