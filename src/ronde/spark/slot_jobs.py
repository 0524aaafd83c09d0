"""Jobs of Spark whose tasks are slots: what a task runs, why a job has failed, and jobs that are cancelled together.

Classic Spark (`cluster`) and Spark Connect (`connect_cluster`) use it.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from pyspark import TaskContext

from ronde.launch.clusters.cluster import Ticket
from ronde.launch.driver.task import run_task

__all__ = ["Submissions", "describe_failure", "is_cancellation", "run_any", "run_once"]

OWN_END_S = 1.0  # for jobs to end with their tasks, before they are interrupted
AGAIN_S = 0.5  # between interruptions
LONGEST_WAIT_S = 5.0  # of `cancel`; other jobs end while the caller goes on
LONGEST_CANCEL_S = 60.0

# Of the last line of a Python traceback in Spark's report of a failed task.
_PYTHON_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b: .*", re.MULTILINE)

# Spark adds this jar to Python's module path. It holds no modules, and each Python takes 20 ms to read its directory.
_CORE_JAR = re.compile(r"(?:.*/)?spark-core_[^/]*\.jar")


def run_any(ticket: Ticket, variables: Mapping[str, str] | None = None) -> list[str]:
    """Run a Spark task, in any attempt. Their ids grow, while the numbers of attempts restart with each stage.

    `variables`: further environment variables of the worker.
    """
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
    """Return whether a Spark job was cancelled, or ended with its session."""
    return re.search("cancel", _text_of(error).splitlines()[0], re.IGNORECASE) is not None


def _text_of(error: Exception) -> str:
    if java := getattr(error, "java_exception", None):  # Py4J's text has a hundred lines of Java
        return str(java.getMessage() or java.toString())
    return str(error)


class Submissions:
    """The jobs or queries of a cluster since it was made or last cancelled. A thread waits for the end of each.

    `tag`: the tag that all of them have. `interrupt`: has Spark cancel the jobs with this tag; returns whether the
    session still lives.
    """

    def __init__(self, interrupt: Callable[[str], bool]) -> None:
        self.tag = f"ronde-{uuid.uuid4().hex}"
        self.is_cancelled = False
        self._interrupt = interrupt
        self._threads: list[threading.Thread] = []

    def start(self, threads: Sequence[threading.Thread]) -> None:
        """Start threads, each of which submits a job and waits for its end."""
        self._threads = [thread for thread in self._threads if thread.is_alive()] + list(threads)
        for thread in threads:
            thread.start()

    def cancel(self) -> None:
        """Return when all jobs have ended, at the latest after `LONGEST_WAIT_S`; interrupt those that do not end soon.

        If the program ended before its tasks, the JVM could not report their accumulators, and would print an error.
        """
        self.is_cancelled = True
        if self._threads:
            thread = threading.Thread(target=self._cancel, name="ronde-spark-cancel", daemon=True)
            thread.start()
            thread.join(LONGEST_WAIT_S)

    def _cancel(self) -> None:
        """Interrupt again and again until no thread waits, because a job that is being submitted misses it."""
        ends_s = time.monotonic() + LONGEST_CANCEL_S
        has_ended = self._wait(OWN_END_S)
        while not has_ended and time.monotonic() < ends_s and self._interrupt(self.tag):
            has_ended = self._wait(AGAIN_S)

    def _wait(self, within_s: float) -> bool:
        """Return whether all threads have ended within the time."""
        ends_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
