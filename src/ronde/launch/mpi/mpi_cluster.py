"""Slots of another cluster as a cluster in which MPI starts the tasks: the job of Ronde runs inside a job of Open MPI.

    the driver --- mpirun --- remote shell, one for each host
        |                          : (its command, through the task)
        |-- MpiJob <-- task 0 (in an executor on a) --- agent --- MPI daemon --- a task for each rank on a
        |          <-- task 1 (in an executor on a) --- agent, which waits
        '-- the job's driver <-- the tasks of all ranks

The other cluster gives the slots. Once all of its tasks have registered, mpirun starts a daemon by the first task of
each host, and the daemons start as many tasks as there are slots. Those register with the driver like tasks of any
cluster, so the driver handles ranks, output, results and failures. The number of a rank in MPI is its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from ronde.environment import environment
from ronde.launch.clusters.base import Capabilities, Capacity, Cluster, SlotEvents, Ticket
from ronde.launch.config import LaunchConfig
from ronde.launch.mpi.mpi_job import MpiJob
from ronde.launch.mpi.plan import check_version
from ronde.launch.mpirun import find_mpirun

__all__ = ["MpiCluster"]


class MpiCluster:
    """The slots of `cluster`, for one job.

    `config`: of the job. `options`: further ones of mpirun. `first_host`, `driver_address`: as of `RunOptions`.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LaunchConfig,
        options: Sequence[str] = (),
        first_host: str = "",
        driver_address: str = "",
    ) -> None:
        self.name = cluster.name
        self.capabilities = Capabilities(elastic=False, gang=True)
        self._cluster, self._config, self._options = cluster, config, options
        self._first_host, self._driver_address = first_host, driver_address
        self._job: MpiJob | None = None

    def capacity(self) -> Capacity | None:
        """Return the slots of the other cluster. Raises UsageError if it does not answer."""
        return self._cluster.capacity()

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Request the slots. Raises UsageError if there is no mpirun of Open MPI here."""
        mpirun, version = find_mpirun(environment())
        check_version(version)
        command = (str(mpirun), *self._options)
        job = MpiJob(self._cluster, self._config, command, tickets, events, self._first_host)
        job.start(self._driver_address)
        self._job = job

    def cancel(self, reason: str) -> None:
        """End mpirun, its daemons and all tasks; return when they have ended."""
        if self._job is not None:
            self._job.end()
        self._cluster.cancel(reason)
