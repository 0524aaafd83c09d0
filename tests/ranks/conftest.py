"""What several files of tests in this folder need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ranks.test_launcher import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        process.kill()
        process.communicate()
