"""Spark Connect as a cluster: for each slot a query of one partition, whose function is the task.

A client of Spark Connect has no Spark context and cannot submit jobs, but a query with a Python function runs a task,
too. As with an elastic job on classic Spark, later attempts of a task end at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pyspark.sql.connect.session import SparkSession

from ronde.launch.clusters.cluster import Capabilities, SlotEvents, Ticket
from ronde.launch.clusters.platforms import report_unencrypted
from ronde.spark.slot_jobs import Submissions, describe_failure, is_cancellation, run_once

__all__ = ["ConnectCluster"]


class ConnectCluster:
    """The executors behind the server to which a session of Spark Connect is connected.

    Args:
        session: The session.
        requires_encryption: Refuse to send the job's key over a connection without TLS, instead of a warning (default:
            false).

    Raises:
        UsageError: The connection has no TLS, leaves this machine, and `requires_encryption` is true.
    """

    name = "Spark"

    def __init__(self, session: SparkSession, requires_encryption: bool = False) -> None:
        self.capabilities = Capabilities(elastic=True, gang=False)
        self._session = session
        self._lock = threading.Lock()
        self._submissions = Submissions(self._interrupt)
        channel = session.client._builder
        if not channel.secure and channel.host not in ("localhost", "127.0.0.1", "::1"):
            report_unencrypted("Spark Connect", "connect with ;use_ssl=true", requires_encryption)

    def capacity(self) -> None:
        """Return None: Spark Connect does not report the number of slots. Raises nothing."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Submit a query for each ticket, in a thread each. Returns at once. Raises nothing.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks. They also get all failures.
        """
        tags = self._session.getTags()  # of the calling thread, by which the caller interrupts its queries
        new_thread = partial(threading.Thread, target=self._run_query, name="ronde-spark-query", daemon=True)
        with self._lock:
            own = self._submissions
            own.start([new_thread(args=(own, tags | {own.tag}, ticket, events)) for ticket in tickets])

    def cancel(self, reason: str) -> None:
        """Return when all queries of this cluster have ended; interrupt those that do not end within a second.

        Those that do not end within five seconds end while the caller goes on. `request` works again after this. Raises
        nothing.

        Args:
            reason: Has no effect: Spark Connect takes no reason.
        """
        with self._lock:
            submissions, self._submissions = self._submissions, Submissions(self._interrupt)
        submissions.cancel()

    def _interrupt(self, tag: str) -> bool:
        """Have Spark interrupt the queries with a tag; return whether the session lives."""
        try:
            self._session.interruptTag(tag)
        except Exception:  # it has ended, and its queries with it
            return False
        return True

    def _run_query(
        self, submissions: Submissions, tags: set[str], ticket: Ticket, events: SlotEvents
    ) -> None:
        """Run a query with these tags in this thread, and report its end."""
        try:
            if submissions.is_cancelled:
                return
            for tag in tags:
                self._session.addTag(tag)
            rows = self._session.range(0, 1, 1, 1).mapInArrow(_task(ticket), "problem string").collect()
        except Exception as error:
            if submissions.is_cancelled:
                return
            if is_cancellation(error):
                events.all_ended(describe_failure(error))
            else:
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
