"""Loggers that load the standard module with their first message."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ronde.light_logging import logger


def test_messages_reach_the_standard_logger_of_that_name(caplog: pytest.LogCaptureFixture) -> None:
    logger("ronde.late").warning("%d%% of it", 7)
    record = caplog.records[0]
    assert (record.name, record.levelname, record.getMessage()) == ("ronde.late", "WARNING", "7% of it")
    assert record.pathname == __file__


def test_the_launcher_does_not_load_the_standard_module() -> None:
    program = "import sys, ronde.launch.driver.agent_main, ronde.launch.agent.agent, ronde.net.rendezvous.over_store"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'logging' not in sys.modules"], check=True)
