"""The command for the night: the sizes of its worlds, and that a failure names its seed."""

from __future__ import annotations

import pytest
from tests.sim import night

from ronde.elastic import batches


def test_most_worlds_are_small_and_some_are_large() -> None:
    sizes = [night.draw_nodes(seed) for seed in range(20_000)]
    assert min(sizes) == 2
    assert max(sizes) == night.MOST_NODES
    assert sum(size <= 6 for size in sizes) > 17_000
    assert any(100 < size < 900 for size in sizes)


def test_a_failure_is_told_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert night.main(["--seeds", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 simulations: ")
    monkeypatch.setattr(batches, "steps_per_epoch", lambda count, batch: count // batch)
    assert night.main(["--seed", "3", "--nodes", "4"]) == 1
    assert "replay: python -m tests.sim.elastic_samples --seed 3 --ranks 4" in capsys.readouterr().out
