"""What Spark runs in a slot, and what a failure there means; classic Spark and Spark Connect use it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from pyspark import TaskContext

from ronde.launch.clusters.cluster import Ticket

__all__ = ["describe_failure", "is_cancellation", "run_any", "run_once"]

# Of the last line of a Python traceback in Spark's report of a failed task.
_PYTHON_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b: .*", re.MULTILINE)

# Spark adds this jar to Python's module path. It holds no modules, and each Python takes 20 ms to read its directory.
_CORE_JAR = re.compile(r"(?:.*/)?spark-core_[^/]*\.jar")


def run_any(ticket: Ticket, variables: Mapping[str, str] | None = None) -> list[str]:
    """Run a Spark task, in any attempt. Their ids grow, while the numbers of attempts restart with each stage.

    `variables`: further environment variables of the worker.
    """
    from ronde.launch.driver.task import run_task

    context = _task_context()
    module_path = [path for path in sys.path if not _CORE_JAR.fullmatch(path)]
    run_task(ticket, context.taskAttemptId(), _gpus(context), module_path, variables)
    return []


def run_once(ticket: Ticket) -> list[str]:
    """Run a Spark task, but no later attempt. Return why it failed, if it did: after an error Spark would try again."""
    if _task_context().attemptNumber():
        return ["its Spark task was lost, with its executor or Python worker"]
    try:
        return run_any(ticket)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _task_context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _gpus(context: TaskContext) -> tuple[str, ...] | None:
    """Return the GPUs that Spark has given the task; None if it gives no GPUs."""
    given = context.resources().get("gpu")
    return tuple(given.addresses) if given else None


def describe_failure(error: Exception) -> str:
    """Return in one line why Spark has ended a job."""
    text = _text_of(error)
    if "No module named 'ronde'" in text:
        return (
            "the Python of the executors does not find Ronde: install it there, or set PYSPARK_PYTHON to a Python that "
            "has it before the session starts"
        )
    python = _PYTHON_ERROR.findall(text)
    first = python[-1] if python else text.strip().splitlines()[0]
    verb = "was cancelled" if is_cancellation(error) else "failed"
    return f"the Spark job {verb}: {first.strip()}"


def is_cancellation(error: Exception) -> bool:
    """Return whether a Spark job has ended because somebody cancelled it, or stopped its session."""
    return re.search("cancel", _text_of(error).splitlines()[0], re.IGNORECASE) is not None


def _text_of(error: Exception) -> str:
    if java := getattr(error, "java_exception", None):  # Py4J's text has a hundred lines of Java
        return str(java.getMessage() or java.toString())
    return str(error)
