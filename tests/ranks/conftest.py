"""What several files of tests in this folder need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks.launcher.test_launcher import Launcher

from ronde.testing import ranks


@pytest.fixture(scope="module", autouse=True)
def _copied_ranks(request: pytest.FixtureRequest) -> None:
    if getattr(request.module, "ranks", None) is ranks and not request.node.get_closest_marker("fresh_ranks"):
        request.getfixturevalue("copied_ranks")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        process.kill()
        process.communicate()
