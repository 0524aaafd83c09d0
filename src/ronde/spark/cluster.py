"""Spark as a cluster: a task of an ordinary Spark job for each slot.

The job does not use Spark's barrier mode, which forbids dynamic allocation, waits long for slots and looks once a
second. Spark tries a lost task again. With a fixed number of workers the driver takes the new attempt until the job
has begun; an elastic job has a Spark job for each slot, whose later attempts end at once, because the driver requests
another one.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext, TaskContext
from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.clusters.cluster import Capabilities, Capacity, SlotEvents, Ticket
from ronde.launch.clusters.platforms import RowsFile, report_unencrypted
from ronde.spark.slot_jobs import Submissions, describe_failure, is_cancellation, run_any, run_once

__all__ = ["SparkCluster"]

_log = logging.getLogger(__name__)

PORT = "spark.ronde.driver.port"
DESCRIPTION = "spark.job.description"
FOLDERS = "SPARK_LOCAL_DIRS"  # for temporary data; Spark tells its Python workers
STOPPED = "the Spark session has been stopped: start a new one"


class SparkCluster:
    """The executors of a Spark application.

        results = ronde.run(train, np=4, cluster=SparkCluster(session.sparkContext))

    Args:
        context: The context of the Spark session, which is not one of Spark Connect.
        is_elastic: Each slot gets a Spark job, so that it can be requested again (default: one job for all slots).
        resources: What each task needs, such as GPUs (default: what `spark.task.*` says).
        requires_encryption: Refuse to send the job's key over a connection that Spark does not encrypt, instead of a
            warning (default: false).

    Raises:
        UsageError: The key would travel unencrypted although `requires_encryption` is true.
    """

    name = "Spark"

    def __init__(
        self,
        context: SparkContext,
        is_elastic: bool = False,
        resources: ResourceProfile | None = None,
        requires_encryption: bool = False,
    ) -> None:
        self.capabilities = Capabilities(elastic=is_elastic, gang=False)
        self._context, self._resources = context, resources
        self._frame: DataFrame | None = None
        self._lock = threading.Lock()
        self._submissions = Submissions(self._interrupt)
        _check_encryption(context, requires_encryption)
        _choose_python(context)

    @property
    def parallelism(self) -> int:
        """How many tasks a Spark job has by default: `spark.default.parallelism`, or the cores of all executors."""
        return int(self._context.defaultParallelism)

    def take_rows(self, frame: DataFrame) -> None:
        """Run tasks where the rows of a data frame are, and give each of them some of these.

        The worker of a task finds them by `ronde.launch.clusters.platforms.ROWS`. Not for elastic jobs. Raises nothing.

        Args:
            frame: A data frame of the same Spark session.
        """
        self._frame = frame

    def driver_address(self) -> tuple[str, int]:
        """Return by which address or name executors reach the program, without brackets, and the port for tasks.

        An empty address and port 0 stand for any.

        Raises:
            UsageError: `spark.ronde.driver.port` in the configuration is not a number.
        """
        conf = self._context._conf  # for a copy PySpark asks the JVM for every setting
        port = str(conf.get(PORT, "0"))
        if not port.isdecimal():
            raise UsageError(f"{PORT}={port} is invalid: expected the number of a TCP port")
        return str(conf.get("spark.driver.host", "")).strip("[]"), int(port)

    def capacity(self) -> Capacity | None:
        """Return how many tasks Spark can run at once, and how many more than now; None if it allocates executors.

        Raises:
            UsageError: The Spark session has been stopped.
        """
        self._require_session()
        try:
            context = self._context._jsc.sc()
            if context.getConf().getBoolean("spark.dynamicAllocation.enabled", False):
                return None
            profile = context.resourceProfileManager().defaultResourceProfile()
            total = int(context.maxNumConcurrentTasks(profile))
            running = sum(info.numRunningTasks() for info in context.statusTracker().getExecutorInfos())
        except Py4JError:  # these are not public
            return None
        return Capacity(total, max(0, total - running))

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Submit a Spark job with a task for each ticket, or in an elastic job a Spark job for each. Returns at once.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks.

        Raises:
            UsageError: The Spark session has been stopped, a local Spark will never have so many slots, or
                PYSPARK_PIN_THREAD=false keeps this process from cancelling Spark jobs.
        """
        self._require_session()
        self._require_slots(len(tickets))
        if environment().get("PYSPARK_PIN_THREAD", "").lower() == "false":
            raise UsageError(
                "PYSPARK_PIN_THREAD=false keeps Ronde from cancelling its Spark jobs: leave it out"
            )
        batches = [[ticket] for ticket in tickets] if self.capabilities.elastic else [list(tickets)]
        with self._lock:
            new_thread = partial(InheritableThread, target=self._run_job, name="ronde-spark", daemon=True)
            self._submissions.start(
                [new_thread(args=(self._submissions, batch, events)) for batch in batches]
            )

    def cancel(self, reason: str) -> None:
        """Return when all Spark jobs of this cluster have ended; cancel those that do not end within a second.

        Those that do not end within five seconds end while the caller goes on. `request` works again after this. Raises
        nothing.

        Args:
            reason: Has no effect: Spark's pages show that the job was cancelled.
        """
        with self._lock:
            submissions, self._submissions = self._submissions, Submissions(self._interrupt)
        submissions.cancel()

    def _require_session(self) -> None:
        if self._has_stopped():
            raise UsageError(STOPPED)

    def _require_slots(self, tasks: int) -> None:
        """Raise UsageError if all tasks have to run at once and Spark never has room for them."""
        if self.capabilities.elastic or self._resources is not None or not _is_one_process(self._context):
            return
        capacity = self.capacity()
        if capacity is not None and tasks > capacity.total:
            raise UsageError(
                f"{tasks} tasks are to run at once, and Spark has {capacity.total} slots: ask for fewer tasks, or give "
                f"the session more threads, as by SparkSession.builder.master('local[{tasks}]')"
            )

    def _has_stopped(self) -> bool:
        try:
            return self._context._jsc is None or bool(self._context._jsc.sc().isStopped())
        except (Py4JError, OSError):  # its JVM is gone
            return True

    def _interrupt(self, tag: str) -> bool:
        """Have Spark cancel the jobs with a tag; return whether the session lives."""
        if self._context._jsc is None:
            return False
        with suppress(Py4JError, OSError):  # the session may be ending
            self._context.cancelJobsWithTag(tag)
        return True

    def _mark_jobs(self, tag: str, description: str) -> None:
        """Give the jobs of this thread a tag of Ronde's. They keep the job group by which the caller cancels them."""
        context = self._context
        context.addJobTag(tag)
        context.setInterruptOnCancel(True)
        if context.getLocalProperty(DESCRIPTION) is None:
            context.setLocalProperty(DESCRIPTION, description)

    def _run_job(self, submissions: Submissions, tickets: list[Ticket], events: SlotEvents) -> None:
        """Run a Spark job in this thread, and report its end."""
        slots = [ticket.slot for ticket in tickets]
        try:
            if submissions.is_cancelled:
                return
            self._mark_jobs(submissions.tag, f"Ronde: {len(slots)} workers")
            problem = self._run_tasks(tickets[0], slots)
        except Exception as error:
            if submissions.is_cancelled:
                return
            if self._has_stopped():
                events.all_ended(STOPPED)
            elif is_cancellation(error) or not self.capabilities.elastic:
                events.all_ended(describe_failure(error), is_loss=not is_cancellation(error))
            else:
                events.slot_ended(slots[0], describe_failure(error))
        else:
            for slot in slots:
                events.slot_ended(slot, problem)

    def _run_tasks(self, ticket: Ticket, slots: Sequence[int]) -> str:
        """Run a task for each slot; return why one failed or none ran, "" if all went well.

        All tickets differ in their slots only, and a large function would travel through a file.
        """
        run = run_once if self.capabilities.elastic else run_any

        # The ticket is in the function because PySpark writes the data of `parallelize` to a file, and the key with it.
        def task(partition: int, _: Iterable[int]) -> Iterable[str]:
            return run(replace(ticket, slot=slots[partition]))

        def task_with_rows(partition: int, variables: Mapping[str, str]) -> None:
            run_any(replace(ticket, slot=slots[partition]), variables)

        if self._frame is not None:
            has_run = _run_at_rows(self._frame, len(slots), task_with_rows) > 0
            return "" if has_run else "the data frame has no rows: expected at least one"
        data = self._context.parallelize(range(len(slots)), len(slots))
        if self._resources is not None:
            data = data.withResources(self._resources)
        problems = data.mapPartitionsWithIndex(task).collect()
        return str(problems[0]) if problems else ""


def _run_at_rows(frame: DataFrame, tasks: int, run: Callable[[int, Mapping[str, str]], None]) -> int:
    """Call `run(partition, variables)` in a Spark task for each partition, of which there are as many as tasks.

    Each task writes the rows of its partition into a file first, so no row passes through the driver.
    Partitions are coalesced, or repartitioned if there are too few. Return how many tasks Spark has run: none if it
    finds out before that there are no rows. Raises an exception of Spark if a task fails.
    """

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        context = TaskContext.get()
        assert context is not None
        folder = environment().get(FOLDERS, "").split(",")[0] or None
        with RowsFile(folder) as rows:
            for batch in batches:
                rows.write(batch)
            run(context.partitionId(), rows.finish())
        yield pyarrow.RecordBatch.from_pydict({"task": pyarrow.array([context.partitionId()], "int32")})

    are_enough = frame.rdd.getNumPartitions() >= tasks
    dealt = frame.coalesce(tasks) if are_enough else frame.repartition(tasks)
    return len(dealt.mapInArrow(task, "task int").collect())


def _is_one_process(context: SparkContext) -> bool:
    """Return whether this is Spark in one process, as with the master local[4]; its slots never change."""
    master: Any = context.master
    return str(master) == "local" or str(master).startswith("local[")


def _check_encryption(context: SparkContext, requires_encryption: bool) -> None:
    """Warn, or raise UsageError, if the job's key would travel from Spark's driver to its executors in the clear."""
    conf = context._conf  # for a copy PySpark asks the JVM for every setting

    def is_on(name: str) -> bool:
        return str(conf.get(name, "false")).lower() == "true"

    is_encrypted = is_on("spark.ssl.rpc.enabled") or (
        is_on("spark.authenticate")
        and (is_on("spark.network.crypto.enabled") or is_on("spark.authenticate.enableSaslEncryption"))
    )
    master: Any = context.master
    if is_encrypted or str(master).startswith("local"):
        return
    remedy = "set spark.authenticate and spark.network.crypto.enabled, or spark.ssl.rpc.enabled, to true"
    report_unencrypted("Spark", remedy, requires_encryption)


def _choose_python(context: SparkContext) -> None:
    """Have a local Spark run this Python in its tasks, unless the user has chosen one; warn if others run another one.

    By default PySpark runs the `python3` that is first in PATH, which is not that of a virtual environment whose
    program was started by its path.
    """
    if "PYSPARK_PYTHON" in environment() or context._conf.contains("spark.pyspark.python"):
        return
    found = shutil.which(context.pythonExec) or context.pythonExec
    master: Any = context.master
    if str(master).startswith("local"):
        context.pythonExec = sys.executable
    elif os.path.dirname(os.path.abspath(found)) != os.path.dirname(sys.executable):
        _log.warning(
            "the executors run %s, and this program runs %s: if they fail because Ronde or another module is not "
            "there, set PYSPARK_PYTHON before the session starts",
            context.pythonExec,
            sys.executable,
        )
