"""Flink as a cluster: a streaming job with a subtask in each slot, which blocks until its agent has ended.

One element goes to all subtasks, whose number is that of the tickets. All belong to one region, so Flink starts them
together and ends them together; it does not restart them, because the driver decides what follows a loss.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyflink
from py4j.protocol import Py4JError, Py4JJavaError
from pyflink.common import Configuration, JobClient, Types
from pyflink.datastream import ProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.java_gateway import get_gateway
from pyflink.table import Table
from pyflink.util.java_utils import get_field_value

from ronde.errors import UsageError
from ronde.flink.table_rows import add_slots, environment_of
from ronde.launch.clusters.client_threads import start_client_thread
from ronde.launch.clusters.cluster import Capabilities, Capacity, SlotEvents, Ticket
from ronde.launch.clusters.platforms import report_unencrypted
from ronde.launch.driver.task import run_task

__all__ = ["FlinkCluster", "check_encryption"]

TARGET, PYTHON, JARS = "execution.target", "python.executable", "pipeline.jars"
LOCAL = "local"
TLS, ENCRYPTED = "security.ssl.internal.enabled", "pekko.ssl.tcp"
POLL_S = 0.2  # between questions whether the job has ended
PAUSE_S = 1.0  # before a cancellation: a job whose tasks have ended is about to end, too
ANSWER_S, ANSWER_POLL_S = 10, 0.02  # for the JobManager to answer; between questions whether it has
TRIES = 5  # to get slots that were free a moment before, if other jobs take them first

_submitting = threading.Lock()  # Flink's environments and its planner are not made for several threads

TABLE_SETTINGS = {"restart-strategy.type": "none", "python.execution-mode": "process"}  # of each job
# Without a table, also these. The element of a subtask is a bundle, which goes to its Python worker at once.
SETTINGS = {
    **TABLE_SETTINGS,
    "execution.runtime-mode": "STREAMING",
    "python.fn-execution.bundle.size": "1",
}

# Of the last line of a Python traceback in Flink's report of a failed task.
_PYTHON_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b: .*", re.MULTILINE)
_SERVER_CAUSE = re.compile(r"^Caused by: (?:\w+\.)*\w+: (.*)", re.MULTILINE)  # in what the JobManager answers
_CANCELLED = "JobCancellationException"
_NO_SLOTS = "NoResourceAvailableException"
_NO_PYFLINK, _NO_RONDE = "No module named 'pyflink'", "No module named 'ronde'"


class FlinkCluster:
    """The slots of the Flink cluster that Flink's configuration names, or of a small one in this process.

        cluster = FlinkCluster({"execution.target": "remote", "rest.address": "jobmanager"})
        results = ronde.run(train, np=4, cluster=cluster)

    Args:
        settings: Settings of Flink, which override those of its configuration (default: none). Without an
            "execution.target", Flink runs in this process.
        requires_encryption: Refuse to send the job's key over a connection that Flink does not encrypt, instead of a
            warning (default: false).

    Raises:
        UsageError: No cluster answers at the place that the settings name, or the key would travel unencrypted although
            `requires_encryption` is true.
    """

    name = "Flink"
    capabilities = Capabilities(elastic=False, gang=True)

    def __init__(self, settings: Mapping[str, str] | None = None, requires_encryption: bool = False) -> None:
        self._requires_encryption = requires_encryption
        self._table: tuple[Table, Sequence[str]] | None = None
        self._is_cancelled = threading.Event()  # what was requested or asked since the last cancellation
        self._use(_new_environment(settings or {}))
        self._java.getCheckpointConfig().disableCheckpointing()  # a blocked task takes no part in checkpoints
        self._following: threading.Thread | None = None

    def _use(self, environment: StreamExecutionEnvironment) -> None:
        """Run jobs in this environment. Raises UsageError as `check_encryption` does."""
        self._environment = environment
        self._java = environment._j_stream_execution_environment
        self._configuration = self._java.getConfiguration()
        self._is_local = self._configuration.getString(TARGET, LOCAL) == LOCAL
        if not self._is_local:
            check_encryption(self._addresses(), self._requires_encryption)

    def take_rows(self, table: Table, columns: Sequence[str]) -> None:
        """Run tasks where the rows of a table are, in its environment, and give each of them some of these.

        The worker of a task finds them by `ronde.launch.clusters.platforms.ROWS`.

        Args:
            table: A table of a streaming or batch environment.
            columns: The names of the columns that the tasks get.

        Raises:
            UsageError: The cluster of the environment does not answer, or the key would travel unencrypted although
                `requires_encryption` is true.
        """
        self._table = table, columns
        self._use(environment_of(table))

    def capacity(self) -> Capacity | None:
        """Return the number of slots of all TaskManagers, and of free ones; None for a cluster in this process.

        Raises:
            UsageError: The cluster does not answer, or another thread has cancelled the job.
        """
        return self._ask_capacity(self._is_cancelled)

    def _ask_capacity(self, is_cancelled: threading.Event) -> Capacity | None:
        if self._is_local:
            return None
        with self._rest_client() as client:
            overview = _ask(client, "ClusterOverviewHeaders", is_cancelled)
            return Capacity(overview.getNumSlotsTotal(), overview.getNumSlotsAvailable())

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Submit a job with a subtask for each ticket, in another thread, when the cluster has enough free slots.

        Raises nothing.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks. They also get all failures.
        """
        is_cancelled = self._is_cancelled
        self._following = threading.Thread(
            target=self._run_job,
            args=(tickets, events, is_cancelled),
            name="ronde-flink",
            daemon=True,
        )
        start_client_thread(self._following, is_cancelled.set)

    def cancel(self, reason: str) -> None:
        """Have the job cancelled, unless it ends now, by the thread that follows it. Returns at once.

        A `capacity` of another thread that waits for its answer ends with an error. Raises nothing.

        Args:
            reason: Has no effect: Flink takes no reason.
        """
        is_cancelled, self._is_cancelled = self._is_cancelled, threading.Event()
        is_cancelled.set()

    def wait(self, seconds: float) -> None:
        """Wait until the job has ended. Raises nothing.

        Args:
            seconds: The longest wait. After it the call returns as well.
        """
        if self._following:
            self._following.join(seconds)

    def _run_job(self, tickets: Sequence[Ticket], events: SlotEvents, is_cancelled: threading.Event) -> None:
        """Run a job, and report its end."""
        capacity = None
        try:
            for last in (*[False] * (TRIES - 1), True):
                capacity = self._await_slots(len(tickets), is_cancelled)
                if is_cancelled.is_set():
                    return
                job = self._submit(tickets)
                self._follow(job, is_cancelled)
                if not self._was_refused(job, last or capacity is None or capacity.total < len(tickets)):
                    break
        except UsageError as error:
            if not is_cancelled.is_set():
                events.all_ended(str(error))
        except Exception as error:
            if not is_cancelled.is_set():
                reason = _describe_failure(error, len(tickets), capacity)
                events.all_ended(reason, is_loss=not _is_cancellation(error))
        else:
            for ticket in tickets:
                events.slot_ended(ticket.slot, "")

    def _was_refused(self, job: JobClient, is_final: bool) -> bool:
        """Return whether a job that has ended got no slots; none of its tasks has started then.

        Raises the error of a job that failed otherwise, and of each if `is_final`.
        """
        try:
            job.get_job_execution_result().result()
        except Py4JJavaError as error:
            if is_final or not _lacks_slots(error):
                raise
            return True
        return False

    def _await_slots(self, count: int, is_cancelled: threading.Event) -> Capacity | None:
        """Wait while others use slots that the job needs: Flink would not wait for them, but let the job fail.

        If the slots are too few, the job is submitted at once, and Flink starts further TaskManagers or refuses it.
        """
        while (capacity := self._ask_capacity(is_cancelled)) and capacity.free < count <= capacity.total:
            if is_cancelled.wait(POLL_S):
                break
        return capacity

    def _submit(self, tickets: Sequence[Ticket]) -> JobClient:
        name = f"Ronde: {len(tickets)} workers"
        if self._table is not None:
            with _submitting, _prepared_for_rows(self._java, len(tickets)):
                add_slots(*self._table, tickets)
                return self._environment.execute_async(name)
        stream = self._environment.from_collection([0], Types.INT()).broadcast()
        stream.process(_SlotFunction(tickets), Types.INT()).set_parallelism(len(tickets)).name("agent")
        return self._environment.execute_async(name)

    def _follow(self, job: JobClient, is_cancelled: threading.Event) -> None:
        """Wait until the job has ended. Cancel it when the cluster is cancelled, unless it is about to end."""
        while not self._has_ended(job):
            if is_cancelled.wait(POLL_S):
                break
        ends_s = time.monotonic() + PAUSE_S
        while not self._has_ended(job):
            time.sleep(POLL_S)
            if time.monotonic() > ends_s:
                ends_s = math.inf
                job.cancel().result()

    def _has_ended(self, job: JobClient) -> bool:
        if self._is_local:  # the cluster in this process ends with its job, and answers no more
            return bool(job.get_job_execution_result().done())
        return bool(job.get_job_status().result().is_globally_terminal_state())

    def _addresses(self) -> list[str]:
        """Return the addresses of the JobManager and of all TaskManagers."""
        with self._rest_client() as client:
            headers = "taskmanager.TaskManagersHeaders"
            infos = _ask(client, headers, self._is_cancelled).getTaskManagerInfos()
            running = [info.getAddress() for info in infos]
            if not running:  # Flink will start them elsewhere
                will_encrypt = self._configuration.getString(TLS, "false") == "true"
                running = [f"{ENCRYPTED}://" if will_encrypt else "pekko.tcp://"]
            return [client.getWebInterfaceURL(), *running]

    @contextmanager
    def _rest_client(self) -> Iterator[Any]:
        """Open a client of the JobManager's REST interface. Raises UsageError if it does not answer."""
        loader = get_gateway().jvm.org.apache.flink.client.deployment.DefaultClusterClientServiceLoader()
        where = "the place that Flink's settings name"
        try:
            with ExitStack() as stack:
                factory = loader.getClusterClientFactory(self._configuration)
                descriptor = stack.enter_context(
                    closing(factory.createClusterDescriptor(self._configuration))
                )
                cluster = descriptor.retrieve(factory.getClusterId(self._configuration))
                client = stack.enter_context(closing(cluster.getClusterClient()))
                where = client.getWebInterfaceURL()
                yield client
        except Py4JError as error:
            raise UsageError(
                f"no Flink cluster answers at {where}: {_root_cause(error)}; check execution.target, rest.address "
                "and rest.port in Flink's settings"
            ) from None


@contextmanager
def _prepared_for_rows(java: Any, parallelism: int) -> Iterator[None]:
    """Prepare the environment of a user's table for one job of Ronde, and restore it."""
    configuration = Configuration(j_configuration=java.getConfiguration())
    before = configuration.to_dict()
    parallelism_before, checkpoints = java.getParallelism(), java.getCheckpointConfig()
    interval = checkpoints.getCheckpointInterval()
    pending = get_field_value(java, "transformations")  # jobs that the user has not started
    others = get_gateway().jvm.java.util.ArrayList(pending)
    pending.removeAll(others)
    for name, value in TABLE_SETTINGS.items():
        configuration.set_string(name, value)
    if configuration.get_string(TARGET, LOCAL) != LOCAL and JARS not in before:
        configuration.set_string(JARS, _python_jars())
    java.setParallelism(parallelism)
    checkpoints.disableCheckpointing()
    try:
        yield
    finally:
        pending.removeAll(pending)
        pending.addAll(others)
        java.setParallelism(parallelism_before)
        for name in (*TABLE_SETTINGS, JARS):
            configuration.remove_config(name)
            if name in before:
                configuration.set_string(name, before[name])
        if interval > 0:
            checkpoints.setCheckpointInterval(interval)


def _new_environment(settings: Mapping[str, str]) -> StreamExecutionEnvironment:
    """Return an environment for jobs on the cluster that `flink run`, the settings or Flink's configuration name."""
    java = get_gateway().jvm.org.apache.flink
    environment_class = java.streaming.api.environment.StreamExecutionEnvironment
    if not environment_class.areExplicitEnvironmentsAllowed():
        # Started by `flink run`, which ships the program.
        configuration = Configuration.from_dict({**settings, **SETTINGS})
        return StreamExecutionEnvironment.get_execution_environment(configuration)

    # PyFlink's own function would take any target for a cluster in this process.
    there = Configuration(j_configuration=java.configuration.GlobalConfiguration.loadConfiguration())
    chosen = {**there.to_dict(), **settings}
    if chosen.get(TARGET, LOCAL) == LOCAL:
        # Without the sizes in the configuration, it has as many slots as the job needs.
        chosen = {TARGET: LOCAL, "execution.attached": "true", PYTHON: sys.executable, **settings}
    else:
        chosen.setdefault(JARS, _python_jars())
    configuration = Configuration.from_dict({**chosen, **SETTINGS})
    return StreamExecutionEnvironment(environment_class(configuration._j_configuration))


def _python_jars() -> str:
    """Return the part of Flink that runs Python, which a cluster need not have, as a list of URLs."""
    return ";".join(jar.as_uri() for jar in Path(pyflink.__path__[0]).glob("opt/flink-python*.jar"))


def _ask(client: Any, headers: str, is_cancelled: threading.Event) -> Any:
    """Return the answer of the JobManager to a question without parameters. Raises UsageError when cancelled."""
    java = get_gateway().jvm
    question = getattr(java.org.apache.flink.runtime.rest.messages, headers).getInstance()
    answer = client.sendRequest(question)
    ends_s = time.monotonic() + ANSWER_S
    while not answer.isDone() and time.monotonic() < ends_s:
        if is_cancelled.wait(ANSWER_POLL_S):
            raise UsageError("the Flink cluster has not answered until the job was cancelled")
    return answer.get(0, java.java.util.concurrent.TimeUnit.SECONDS)


def check_encryption(urls: Sequence[str], is_required: bool) -> None:
    """Warn if the job's key would travel unencrypted to an address of Flink.

    Args:
        urls: The addresses of the JobManager and of the TaskManagers.
        is_required: Raise instead of a warning.

    Raises:
        UsageError: It would, and `is_required` is true.
    """
    for url in map(urlsplit, urls):
        is_here = url.hostname in ("127.0.0.1", "::1", "localhost")
        if not is_here and url.scheme not in ("https", ENCRYPTED):
            remedy = f"set {TLS} and security.ssl.rest.enabled to true"
            report_unencrypted("Flink", remedy, is_required)
            return


class _SlotFunction(ProcessFunction):  # type: ignore[misc]  # PyFlink has no types
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


# Why Flink ended or refused a job


def _describe_failure(error: Exception, wanted: int = 0, capacity: Capacity | None = None) -> str:
    """Return in one line why Flink ended or refused a job.

    `wanted`, `capacity`: how many slots the job needs, and those of the cluster.
    """
    causes = _java_causes(error) or [str(error)]
    text = causes[-1]
    if _is_cancellation(error):
        return "the Flink job was cancelled"
    if _lacks_slots(error):
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


def _is_cancellation(error: Exception) -> bool:
    """Return whether a user or program cancelled the job."""
    return any(_CANCELLED in cause for cause in _java_causes(error) or [str(error)])


def _lacks_slots(error: Exception) -> bool:
    """Return whether Flink had too few slots for a job."""
    return any(_NO_SLOTS in cause for cause in _java_causes(error) or [str(error)])


def _root_cause(error: Exception) -> str:
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
