"""A real Spark on this machine, with two executors of one core, each a JVM, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cluster_kinds import engine_environment
from tests.ports import free_port

__all__ = [
    "PATIENCE_S",
    "ROOT",
    "connect_server",
    "new_session",
    "session_of_two_executors",
    "until_it_listens",
]

ROOT = Path(__file__).parents[2]
MASTER = "local-cluster[2,1,1024]"
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",  # not 200
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.executorEnv.PYTHONPATH": str(ROOT),  # functions of test modules
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
PATIENCE_S = 480  # against hanging only


def new_session(**settings: str) -> Any:
    """Return a new session; keys of `settings` have underscores for points."""
    pyspark = pytest.importorskip("pyspark", reason="PySpark is not installed here")
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = pyspark.sql.SparkSession.builder.master(MASTER).appName("tests")
    given = {key.replace("_", "."): value for key, value in settings.items()}
    for key, value in {**SETTINGS, **given}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def session_of_two_executors(**settings: str) -> Iterator[Any]:
    """Start the session, and stop it in the end. `settings`: as of `new_session`."""
    with engine_environment():
        session = new_session(**settings)
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def connect_server() -> Iterator[str]:
    """Start a server of Spark Connect with two executors; yield its URL."""
    import pyspark

    home, port = Path(pyspark.__file__).parent, free_port("127.0.0.1")
    settings = {**SETTINGS, "spark.connect.grpc.binding.port": str(port)}
    words = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    program = "org.apache.spark.sql.connect.service.SparkConnectServer"
    with engine_environment(), tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [
                str(home / "bin" / "spark-submit"),
                "--master",
                MASTER,
                *words,
                "--class",
                program,
                "spark-internal",
            ],
            env={**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable},
            stdout=log,
            stderr=log,
        )
    with server:
        try:
            until_it_listens("127.0.0.1", port)
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.terminate()


def until_it_listens(host: str, port: int) -> None:
    """Wait until a service listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(OSError), socket.create_connection((host, port), 1):
            return
        assert time.monotonic() < deadline, f"nobody listens at port {port} of {host}"
        time.sleep(0.05)
