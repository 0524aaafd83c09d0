"""`ronde.spark.run` from a client of Spark Connect, whose server has two executors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters.spark_session import PATIENCE_S, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow]
pytest.importorskip("pyspark", reason="PySpark is not installed here")
pytest.importorskip("grpc_status", reason="the packages of Spark Connect are not installed here")

_PROGRAM = """
import logging, time
from pyspark.sql import SparkSession
import ronde.spark
from ronde import UsageError, WorkerError

session = SparkSession.builder.remote("local-cluster[2,1,1024]").getOrCreate()

def train(epochs):
    import ronde
    ronde.init()
    return float(ronde.allreduce(ronde.rank() * epochs, op=ronde.Sum))

def fails():
    import os, time
    if os.environ["RANK"] == "1":
        raise LookupError("no such column")
    time.sleep(600)

print("result", ronde.spark.run(train, (10,), num_proc=2))
try:
    ronde.spark.run(fails, num_proc=2)
except WorkerError as error:
    print("error", error.rank, "LookupError: no such column" in str(error))
try:
    ronde.spark.run(train, (10,))
except UsageError as error:
    print(error)
session.stop()
"""


def test_a_function_runs_on_the_executors_of_the_server(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(_PROGRAM)
    import pyspark

    home = str(Path(pyspark.__file__).parent)
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": home, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=env,
        check=False,
    )
    assert "result [10.0, 10.0]" in done.stdout, done.stderr
    assert "error 1 True" in done.stdout
    assert "num_proc is missing: Spark Connect does not report" in done.stdout
