"""Spark Connect as a cluster: for each slot a query of one partition, whose function is the task.

A client of Spark Connect has no Spark context and cannot submit jobs, but a query with a Python function runs a task,
too. As with an elastic job on classic Spark, later attempts of a task end at once.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark.sql.connect.session import SparkSession

from ronde.launch.clusters.base import Capabilities, SlotEvents, Ticket
from ronde.launch.clusters.key_transport import report_unencrypted
from ronde.spark.tasks import describe_failure, run_once

__all__ = ["ConnectCluster"]

PAUSE_S = 0.2  # before an interruption, for each query: that of a task that has ended is about to end, too
LONGEST_CANCEL_S = 60


class ConnectCluster:
    """The executors behind the server to which a session of Spark Connect is connected.

    `requires_encryption`: as of `SparkCluster`.
    """

    name = "Spark"

    def __init__(self, session: SparkSession, requires_encryption: bool = False) -> None:
        self.capabilities = Capabilities(elastic=True, gang=False)
        self._session = session
        self._tag = f"ronde-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._queries: list[threading.Thread] = []
        self._is_cancelled = False
        channel = session.client._builder
        if not channel.secure and channel.host not in ("localhost", "127.0.0.1", "::1"):
            report_unencrypted("Spark Connect", "connect with ;use_ssl=true", requires_encryption)

    def capacity(self) -> None:
        """Return None: Spark Connect does not tell."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Submit a query for each ticket."""
        queries = [
            threading.Thread(
                target=self._run_query, args=(ticket, events), name="ronde-spark-query", daemon=True
            )
            for ticket in tickets
        ]
        with self._lock:
            self._queries = [query for query in self._queries if query.is_alive()] + queries
        for query in queries:
            query.start()

    def cancel(self, reason: str) -> None:
        """Interrupt all queries of this cluster that do not end now, in another thread."""
        with self._lock:
            if not self._is_cancelled:
                self._is_cancelled = True
                threading.Thread(target=self._interrupt, name="ronde-spark-interrupt", daemon=True).start()

    def _interrupt(self) -> None:
        """Interrupt until no query runs: one that is just being submitted does not notice."""
        ends_s = time.monotonic() + LONGEST_CANCEL_S
        while time.monotonic() < ends_s:
            for query in self._queries:
                query.join(PAUSE_S)
            if not any(query.is_alive() for query in self._queries):
                return
            try:
                self._session.interruptTag(self._tag)
            except Exception:  # the session has ended, and its queries with it
                return

    def _run_query(self, ticket: Ticket, events: SlotEvents) -> None:
        """Run a query in this thread, whose tag it gets, and report its end."""
        try:
            if self._is_cancelled:
                return
            self._session.addTag(self._tag)
            rows = self._session.range(0, 1, 1, 1).mapInArrow(_task(ticket), "problem string").collect()
        except Exception as error:
            if not self._is_cancelled:
                events.slot_ended(ticket.slot, describe_failure(error))
        else:
            events.slot_ended(ticket.slot, rows[0].problem if rows else "")


def _task(ticket: Ticket) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function of the query, which yields the problem if there is one."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        for _ in batches:  # one row, which says nothing
            pass
        for problem in run_once(ticket):
            yield pyarrow.RecordBatch.from_pydict({"problem": [problem]})

    return run
