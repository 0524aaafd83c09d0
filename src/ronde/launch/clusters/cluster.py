"""The interface of a cluster: a platform, such as Spark or Ray, that gives slots in which agents run.

A cluster only places agents. The driver handles ranks, commands, results, output and failures.

To add a cluster, implement `Cluster`:

  1. `request` makes the platform start one task for each ticket. The task calls `run_task(ticket, attempt)` of
     `ronde.launch.driver.task`, and does nothing else. `run_task` connects to the driver, starts an agent, forwards its
     output, and returns when the agent has ended.
  2. The cluster reports each task's end to `SlotEvents.slot_ended`, and the end of the whole request, if the platform
     fails or cancels it, to `SlotEvents.all_ended`. The driver also notices a task's end by its connection; the events
     add the reason, and report tasks that never started.
  3. `cancel` ends the tasks. The platform may kill them: an agent ends its workers when its task is gone.

A platform may start a task again (a retry) or twice (speculation), each time with another `attempt`. The driver refuses
a lower attempt than it knows, and a second task with the same attempt while the first one is connected. A platform
without such numbers leaves `attempt` at 0.

A package registers its cluster by an entry point of the group `ronde.clusters`, which names a callable without required
arguments that returns a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ronde.errors import UsageError
from ronde.net.authentication import Protection

__all__ = [
    "Capabilities",
    "Capacity",
    "Cluster",
    "SlotEvents",
    "Ticket",
    "registered_cluster",
]

_GROUP = "ronde.clusters"


@dataclass(frozen=True)
class Ticket:
    """What a task needs to take part in a job: the argument of `run_task`. It can be pickled.

    It carries the job's key, so treat it like a password: send it only over connections that the platform encrypts, and
    never write it to a log, a command line or an environment. Its `repr` leaves the key out.

    Attributes:
        slot: The number of the slot, from 0. The driver numbers hosts by their lowest slot.
        addresses: Where the driver listens, such as `tcp:10.0.0.1:4000`, the likely ones first.
        job_key: The 32 bytes with which task and driver prove to each other that they belong to the job.
        protection: `SEALED`: messages carry tags; `SECRET`: they are encrypted, too.
        start_timeout_ns: How long the task tries to reach the driver, and waits for its answer.
        python: The Python that runs the agent; None: that of the task.
    """

    slot: int
    addresses: tuple[str, ...]
    job_key: bytes = field(repr=False)
    protection: Protection
    start_timeout_ns: int
    python: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a platform can do.

    Attributes:
        elastic: A slot whose task has ended can be requested again while the others run.
        gang: All tasks of one request start together, or none of them.
    """

    elastic: bool
    gang: bool


@dataclass(frozen=True)
class Capacity:
    """The present numbers of slots of a platform.

    Attributes:
        total: All slots.
        free: The slots that a task could have now.
    """

    total: int
    free: int


class SlotEvents(Protocol):
    """What a cluster reports about the tasks of a request. Any thread may call it."""

    def slot_ended(self, slot: int, reason: str) -> None:
        """Note that the task of a slot has ended and will not be tried again. Raises nothing.

        Args:
            slot: The number in its ticket.
            reason: Why it failed, in one line; "" if it returned normally.
        """

    def all_ended(self, reason: str, is_loss: bool = False) -> None:
        """Note that the platform has failed or cancelled the whole request. None of its tasks runs or will run.

        Raises nothing.

        Args:
            reason: Why, in one line, such as "the Spark job was cancelled in the UI".
            is_loss: Whether the platform ended the other tasks because it lost one, for example with its machine, so
                that another request may succeed (False: a user or the platform ended them on purpose).
        """


class Cluster(Protocol):
    """A platform that gives slots to tasks, as the driver of one job uses it.

    The driver calls `capacity` and `request` from one thread, and `cancel` from any.
    """

    @property
    def name(self) -> str:
        """The name of the platform for messages, such as "Spark"."""

    @property
    def capabilities(self) -> Capabilities:
        """What the platform can do. It does not change during a job."""

    def capacity(self) -> Capacity | None:
        """Return the present numbers of slots, or None if the platform does not report them. May take a second.

        Raises:
            UsageError: The platform does not answer. The error names the platform and the place where it was asked.
        """

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Make the platform call `run_task(ticket)` once for each ticket, each in a separate slot. Returns at once.

        The tasks start when the platform has room for them. If `Capabilities.elastic` is true, the driver may call this
        again, with a ticket for a slot whose task has ended.

        Args:
            tickets: One for each task.
            events: Takes the reports about these tasks.

        Raises:
            UsageError: The platform cannot be asked, for example because its session has ended.
        """

    def cancel(self, reason: str) -> None:
        """End all requested tasks, also those that have not started.

        Returns at once, or when they have ended. A second call does nothing. Any thread may call it. Raises nothing.

        Args:
            reason: Why, for the logs and pages of the platform.
        """


def registered_cluster(name: str) -> Cluster:
    """Return a new cluster of a name, such as "spark".

    Args:
        name: The name of an entry point of the group `ronde.clusters`.

    Raises:
        UsageError: No installed package has registered the name, its platform is not installed, or the cluster cannot
            be made, for example because there is no Spark session.
    """
    from importlib.metadata import entry_points  # here, because it is slow and seldom needed

    points = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UsageError(
            f"unknown cluster {name!r}: the registered ones are: {known} (docs/adding-a-cluster.md)"
        )
    try:
        make: Callable[[], Cluster] = points[name].load()
    except ImportError as error:
        raise UsageError(f"the cluster {name!r} cannot be used: {error}; install what it needs") from None
    return make()
