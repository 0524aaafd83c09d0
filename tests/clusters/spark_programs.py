"""Programs on a standalone Spark, with what their workers do. They run in processes without pytest."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.conformance.cluster_kinds import agent_of, parent_of

import ronde


def run_program(output: str) -> None:
    """Run the program that standard input tells, in a session, and write its result as JSON to a file."""
    from pyspark.sql import SparkSession

    task = json.load(sys.stdin)
    builder = SparkSession.builder.appName("tests")
    for key, value in task["settings"].items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        result = globals()[task["program"]](**task["arguments"])
    finally:
        session.stop()
    Path(output).write_text(json.dumps(result))


def where() -> tuple[int, float, str]:
    """Return the host's number in the job, a sum over all ranks, and the address by which the others reach rank 0."""
    ronde.init()
    total = ronde.allreduce(1.0, op=ronde.Sum)
    return ronde.cross_rank(), float(total), os.environ["MASTER_ADDR"]


def gpus() -> tuple[int, int, str]:
    """Return the place of a rank, and the GPUs that it sees."""
    ronde.init()
    return ronde.cross_rank(), ronde.local_rank(), os.environ["CUDA_VISIBLE_DEVICES"]


def trains(folder: Path) -> int:
    """Take steps from the last one noted, kill an executor, and go on until all ranks are there again.

    Return the first step of these workers. The number of ranks of each step is noted.
    """
    ronde.init()
    noted, killed = folder / "sizes", folder / "killed"
    first = int(ronde.broadcast_object(len(noted.read_text()) if noted.exists() else 0))
    for step in range(first, 4000):
        has_happened = ronde.broadcast_object(killed.exists())
        if ronde.rank() == 0:
            with noted.open("a") as file:
                file.write(str(ronde.size()))
        if has_happened and ronde.size() == 2:
            return first
        if ronde.rank() == 1 and step > first + 5:
            killed.touch()
            python_worker = parent_of(agent_of(os.getpid()))
            os.kill(parent_of(parent_of(python_worker)), signal.SIGKILL)  # the executor
            time.sleep(600)
        time.sleep(0.05)
    raise RuntimeError("the second rank did not come back")


# Programs


def places(**options: Any) -> Any:
    """Run on both hosts; return what the ranks tell, and the messages."""
    import ronde.spark

    messages = io.StringIO()
    found = ronde.spark.run(where, num_proc=2, start_timeout=100, stderr=messages, **options)
    return found, messages.getvalue()


def grows(folder: str) -> Any:
    """Begin without executors; return the results of a job, of an elastic job, and of one with GPUs."""
    from pyspark import SparkContext
    from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

    import ronde.spark

    context = SparkContext.getOrCreate()
    executors = len(context._jsc.sc().statusTracker().getExecutorInfos()) - 1  # the driver is one
    found, _ = places()
    nics = ["direct"]  # an elastic job does not find it out
    first = ronde.spark.run_elastic(trains, (Path(folder),), min_num_proc=1, max_num_proc=2, nics=nics)
    executor = ExecutorResourceRequests().cores(2).memory("512m").resource("gpu", 2)
    task = TaskResourceRequests().cpus(1).resource("gpu", 1)
    profile = ResourceProfileBuilder().require(executor).require(task).build
    seen = ronde.spark.run(gpus, num_proc=4, start_timeout=100, resources=profile)
    return executors, found, first, seen
