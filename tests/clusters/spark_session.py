"""A real Spark on this machine, with two executors of one core, each a JVM, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MARK_NAME, MARK_VALUE

__all__ = ["ROOT", "agents", "new_session", "parent_of", "session_of_two_executors"]

ROOT = Path(__file__).parents[2]


def new_session(**settings: str) -> Any:
    """Return a new session; keys of `settings` have underscores for points."""
    pyspark = pytest.importorskip("pyspark", reason="PySpark is not installed here")
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = pyspark.sql.SparkSession.builder.master("local-cluster[2,1,1024]").appName("tests")
    given = {key.replace("_", "."): value for key, value in settings.items()}
    fixed = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.executorEnv.PYTHONPATH": str(ROOT),  # functions of test modules
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    for key, value in {**fixed, **given}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def session_of_two_executors() -> Iterator[Any]:
    """Start the session. What it starts carries this run's mark under another name: it outlives a single test."""
    mark = os.environ.pop(MARK_NAME)
    os.environ["TEST_ENGINE_OF_RONDE"] = mark
    try:
        session = new_session()
    finally:
        os.environ[MARK_NAME] = os.environ.pop("TEST_ENGINE_OF_RONDE")
    try:
        yield session
    finally:
        session.stop()


def parent_of(pid: int) -> int:
    """Return the process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def agents() -> list[int]:
    """Return the process ids of the agents that run in executors of this test run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_agent = b"ronde.launch.driver.agent_main" in (folder / "cmdline").read_bytes().split(b"\0")
            if is_agent and f"={MARK_VALUE}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
