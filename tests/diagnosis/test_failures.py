"""Every planted failure: `ronde run` explains it in time and ends with the right exit code.

The fixture in tests/conftest.py checks that nothing is left behind.
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
