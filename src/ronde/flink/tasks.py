"""What Flink runs in a slot, and what a failure there means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pyflink.datastream import ProcessFunction, RuntimeContext

from ronde.launch.clusters.cluster import Capacity, Ticket
from ronde.launch.driver.task import run_task

__all__ = ["SlotFunction", "describe_failure", "is_cancellation", "lacks_slots", "root_cause"]

# Of the last line of a Python traceback in Flink's report of a failed task.
_PYTHON_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b: .*", re.MULTILINE)
_SERVER_CAUSE = re.compile(r"^Caused by: (?:\w+\.)*\w+: (.*)", re.MULTILINE)  # in what the JobManager answers
_CANCELLED = "JobCancellationException"
_NO_SLOTS = "NoResourceAvailableException"
_NO_PYFLINK, _NO_RONDE = "No module named 'pyflink'", "No module named 'ronde'"


class SlotFunction(ProcessFunction):  # type: ignore[misc]  # PyFlink has no types
    """Blocks in `run_task` when its element comes. Each subtask, one in each slot, takes the ticket of its index."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def open(self, runtime_context: RuntimeContext) -> None:
        """Note which subtask this is, and in which attempt."""
        self._ticket = self._tickets[runtime_context.get_index_of_this_subtask()]
        self._attempt = runtime_context.get_attempt_number()

    def process_element(self, value: Any, ctx: ProcessFunction.Context) -> Iterator[Any]:
        """Run the task. It emits nothing."""
        run_task(self._ticket, self._attempt)
        return iter(())


def describe_failure(error: Exception, wanted: int = 0, capacity: Capacity | None = None) -> str:
    """Return in one line why Flink ended or refused a job.

    `wanted`, `capacity`: how many slots the job needs, and those of the cluster.
    """
    causes = _java_causes(error) or [str(error)]
    text = causes[-1]
    if is_cancellation(error):
        return "the Flink job was cancelled"
    if lacks_slots(error):
        there = f"{capacity.total} slots, {capacity.free} of them free" if capacity else "fewer"
        return f"the Flink job failed: it needs {wanted} slots, and Flink has {there}"
    if _NO_PYFLINK in text or _NO_RONDE in text:
        return (
            "the Python of the TaskManagers does not find PyFlink and Ronde: install them there, or name a Python that "
            "has them, python.executable in Flink's settings"
        )
    named = _PYTHON_ERROR.findall(text) or _SERVER_CAUSE.findall(text)
    first = named[-1] if named else text.strip().splitlines()[0]
    return f"the Flink job failed: {first.strip()}"


def is_cancellation(error: Exception) -> bool:
    """Return whether somebody cancelled the job."""
    return any(_CANCELLED in cause for cause in _java_causes(error) or [str(error)])


def lacks_slots(error: Exception) -> bool:
    """Return whether Flink had too few slots for a job."""
    return any(_NO_SLOTS in cause for cause in _java_causes(error) or [str(error)])


def root_cause(error: Exception) -> str:
    """Return in one line the Java exception that is the root of one of Py4J."""
    return (_java_causes(error) or [str(error)])[-1].strip(": \n").splitlines()[0]


def _java_causes(error: Exception) -> list[str]:
    """Return the Java exceptions behind one of Py4J, with their messages.

    The last one is the root, or a cause above it whose message ends with that of the root and says more.
    """
    causes: list[str] = []
    java = getattr(error, "java_exception", None)
    while java is not None:
        name, message = java.getClass().getSimpleName(), java.getMessage() or ""
        if not (message and causes and causes[-1].endswith(message)):
            causes.append(f"{name}: {message}")
        java = java.getCause()
    return causes
