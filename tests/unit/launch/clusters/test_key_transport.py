"""A platform that sends the job's key in the clear: a warning, or a refusal."""

from __future__ import annotations

import pytest

from ronde import UsageError
from ronde.launch.clusters.key_transport import report_unencrypted


def test_it_warns_or_refuses(caplog: pytest.LogCaptureFixture) -> None:
    report_unencrypted("Yarn", "encrypt it", is_refused=False)
    assert "Yarn sends its tasks unencrypted" in caplog.text
    with pytest.raises(UsageError, match=r"can join the job: encrypt it$"):
        report_unencrypted("Yarn", "encrypt it", is_refused=True)
