"""Every planted failure: it is said what is wrong, in time, with the right exit code, and nothing is left behind.

That nothing is left, the fixture in tests/conftest.py checks after every test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnosis import calls, endings, starting, training, waiting
from tests.diagnosis.failure import Failure, as_parameters


@pytest.mark.parametrize(
    "failure",
    as_parameters(
        [*endings.FAILURES, *calls.FAILURES, *starting.FAILURES, *waiting.FAILURES, *training.FAILURES]
    ),
)
def test_it_says_why(failure: Failure, tmp_path: Path) -> None:
    failure.check(failure.run(tmp_path))
