"""Groups of gradients, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from ronde.torch.gradients import make_groups  # noqa: E402 (needs PyTorch)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "-----"), (1, "aaaaa"), (2, "aabbb"), (3, "-aabb"), (4, "---aa"), (5, "-----"), (9, "-----")],
)
def test_a_number_of_groups_of_neighbours_has_every_gradient(count: int, expected: str) -> None:
    gradients: list[Any] = [SimpleNamespace(name=f"layer{at}", group=None) for at in range(5)]
    groups: list[Any] = make_groups(gradients, (), count)
    letters = dict(zip(groups, "abcde"))
    assert "".join(letters[each.group] if each.group else "-" for each in gradients) == expected
