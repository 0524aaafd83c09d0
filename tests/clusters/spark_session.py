"""A real Spark on this machine, with two executors of one core, each a JVM, for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cluster_kinds import engine_environment

__all__ = ["ROOT", "new_session", "session_of_two_executors"]

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
    """Start the session, and stop it in the end."""
    with engine_environment():
        session = new_session()
    try:
        yield session
    finally:
        session.stop()
