"""Dask as a cluster: one Dask task for each slot, on a free thread of a worker.

Dask cannot interrupt a running task. Such a task ends when its agent does, and the driver ends that by its connection.

Dask would run the task of a lost worker again. This cluster learns of the loss from the scheduler and cancels the task,
because the driver decides what follows.

The cluster reports the end of tasks that it cancels itself, at once: the callbacks of a client may never run after the
client is closed, and a callback that asks a closed client may block for ever, and all later callbacks of the process
with it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distributed import Client, Future

from ronde.dask.frame_rows import compute_partitions, run_with_rows
from ronde.errors import UsageError
from ronde.launch.clusters.client_threads import start_client_thread
from ronde.launch.clusters.cluster import Capabilities, Capacity, SlotEvents, Ticket
from ronde.launch.clusters.platforms import deal_partitions, report_unencrypted
from ronde.launch.driver.task import run_task

__all__ = ["DaskCluster"]

WORKERS_TOPIC = "all"  # the scheduler's topic for workers that come and go
EXCEPTION_S = 5  # for a client to tell the exception of a task


class DaskCluster:
    """Slots of the Dask cluster to which `client` is connected: one for each thread of its workers.

        results = ronde.run(train, np=4, cluster=DaskCluster(Client(address)))

    It opens a second connection to the scheduler, so that the subscriptions of `client` stay as they are. `cancel`
    closes it.

    Args:
        client: A client of the cluster that is connected and not asynchronous.
        requires_encryption: Refuse to send the job's key over a connection that Dask does not encrypt, instead of a
            warning (default: false).

    Raises:
        UsageError: The client is not one of Dask, is asynchronous, or is closed.
    """

    name = "Dask"
    capabilities = Capabilities(elastic=True, gang=False)

    def __init__(self, client: Client, requires_encryption: bool = False) -> None:
        if not hasattr(client, "asynchronous"):
            raise UsageError(f"{client!r} is no Dask client: give distributed.Client(address)")
        if client.asynchronous:
            raise UsageError(
                "the Dask client is asynchronous, and a job would block its event loop: give one that is not, as "
                "distributed.Client(address), perhaps in a thread (asyncio.to_thread)"
            )
        self._given = client
        self._require_open()
        self._requires_encryption = requires_encryption
        self._own: Client | None = None
        self._requests = threading.Lock()  # a request and a cancellation do not overlap
        self._lock = threading.Lock()
        self._running: dict[str, tuple[int, Future, SlotEvents]] = {}  # by the key of the Dask task
        self._frame: Any = None

    def take_rows(self, frame: Any) -> None:
        """Run tasks where the rows of a data frame are, and give each of them some of its partitions.

        The worker of a task finds them by `ronde.launch.clusters.platforms.ROWS`. Not for elastic jobs. Raises nothing.

        Args:
            frame: A data frame of Dask.
        """
        self._frame = frame

    def capacity(self) -> Capacity:
        """Return the number of threads of all workers, and of those that run no task.

        Raises:
            UsageError: The scheduler does not answer, or the client is closed.
        """
        with self._answering():
            return Capacity(sum(self._given.nthreads().values()), len(self._free_threads()))

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Submit a Dask task for each ticket. Those beyond the free threads wait until Dask finds a worker.

        Tasks with rows start when all partitions have been computed.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks.

        Raises:
            UsageError: The scheduler does not answer, the client is closed, or the key would travel unencrypted
                although `requires_encryption` is true.
        """
        with self._requests:
            with self._answering():
                client = self._connect()
                free = self._free_threads()
            if self._frame is None:
                self._submit(client, [(run_task, ticket, 0) for ticket in tickets], free, tickets, events)
                return
        starting = threading.Thread(
            target=self._start_with_rows, args=(client, tickets, events), name="ronde-dask", daemon=True
        )
        start_client_thread(starting)  # it ends when the cluster is cancelled

    def _submit(
        self,
        client: Client,
        calls: Sequence[tuple[Any, ...]],
        places: Sequence[str],
        tickets: Sequence[Ticket],
        events: SlotEvents,
    ) -> None:
        """Submit a call for each ticket, to the workers of these addresses as far as there are enough."""
        for index, (ticket, call) in enumerate(zip(tickets, calls)):
            key = f"ronde-{ticket.slot}-{uuid.uuid4().hex}"
            place = {"workers": [places[index]]} if index < len(places) else {}
            future = client.submit(*call, key=key, pure=False, retries=0, **place)
            with self._lock:
                self._running[key] = ticket.slot, future, events
            future.add_done_callback(self._ended)

    def _start_with_rows(self, client: Client, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Compute the partitions of the frame, and submit tasks where they are. Runs in a thread."""
        count = len(tickets)
        try:
            parts = compute_partitions(self._given, client, self._frame, count, lambda: self._uses(client))
            with self._requests:
                if parts is None or not self._uses(client):  # this request has been cancelled
                    return
                with self._answering():
                    free, holders = self._free_threads()[:count], client.who_has(parts)
                places = [*free, *[""] * (count - len(free))]
                dealt = deal_partitions([holders[part.key] for part in parts], places)
                calls = [
                    (run_with_rows, ticket, [parts[number] for number in numbers])
                    for ticket, numbers in zip(tickets, dealt)
                ]
                self._submit(client, calls, free, tickets, events)
        except Exception as error:
            if self._uses(client):
                first = (str(error) or "no details").splitlines()[0]
                events.all_ended(
                    f"the partitions of the Dask data frame cannot be computed: {type(error).__name__}: {first}"
                )

    def cancel(self, reason: str) -> None:
        """Withdraw all tasks, and close the connection to the scheduler. A second call does nothing. Raises nothing.

        Args:
            reason: Why, for the reports about the tasks.
        """
        with self._requests:
            client, self._own = self._own, None
            futures = self._end_tasks(None, f"the Dask task was cancelled: {reason}")
            if client:
                client.cancel(futures)
                client.unsubscribe_topic(WORKERS_TOPIC)
                client.close()

    def _require_open(self) -> None:
        if self._given.scheduler is None:
            raise UsageError("the Dask client is closed, or not yet connected: give an open one")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Let a failure to reach the scheduler, inside a `with` block, be a UsageError."""
        self._require_open()
        address = self._given.scheduler.address
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"the Dask scheduler does not answer at {address}: {error}; check that it runs, and create another "
                "client"
            ) from None

    def _connect(self) -> Client:
        if self._own is None:
            address, security = self._given.scheduler.address, self._given.security
            _check_encryption(address, self._requires_encryption)
            self._own = Client(address, security=security, set_as_default=False, name="ronde")
            self._own.subscribe_topic(WORKERS_TOPIC, self._note_lost_worker)
        return self._own

    def _uses(self, client: Client) -> bool:
        """Return whether no cancellation has closed this client."""
        return self._own is client

    def _free_threads(self) -> list[str]:
        """Return the address of a worker once for each of its threads that runs no task."""
        busy = self._given.processing()
        threads = sorted(self._given.nthreads().items())
        return [address for address, count in threads for _ in range(count - len(busy.get(address, ())))]

    async def _note_lost_worker(self, event: tuple[float, dict[str, Any]]) -> None:
        """Cancel the tasks of a worker that the scheduler has removed. Runs in the event loop of the client."""
        message = event[1]
        if message.get("action") != "remove-worker":
            return
        futures = self._end_tasks(
            message["processing-tasks"], f"the Dask worker {message['worker']} was lost"
        )
        client = self._own
        if client and futures:
            await client.cancel(futures)

    def _ended(self, future: Future) -> None:
        """Report the end of a task, unless this cluster has cancelled it. Runs in a thread of Dask's."""
        if future.key in self._running:
            self._end_tasks([future.key], _reason(future))

    def _end_tasks(self, keys: Iterable[str] | None, reason: str) -> list[Future]:
        """Report that these tasks have ended, None for all; return the futures of those that ran until now."""
        with self._lock:
            running = list(self._running) if keys is None else [key for key in keys if key in self._running]
            ended = [self._running.pop(key) for key in running]
        for slot, _, events in ended:
            events.slot_ended(slot, reason)
        return [future for _, future, _ in ended]


def _reason(future: Future) -> str:
    """Return why a task has ended, empty if it has returned."""
    if future.status == "finished":
        return ""
    if future.status != "error":
        return "the Dask task was cancelled, or the scheduler is gone"
    try:
        error = future.exception(timeout=EXCEPTION_S)
    except Exception as problem:  # the client is closed meanwhile
        return f"the Dask task failed, and its exception is not known: {type(problem).__name__}"
    return f"{type(error).__name__}: {error}"


def _check_encryption(address: str, is_required: bool) -> None:
    """Warn, or raise UsageError, if the job's key would travel from this process to other hosts in the clear."""
    protocol, _, place = address.rpartition("://")
    is_here = protocol == "inproc" or place.rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")
    if protocol not in ("tls", "wss") and not is_here:
        report_unencrypted("Dask", "use a scheduler with TLS (distributed.security.Security)", is_required)
