"""How the workers of one node are started: with which output, on which cores, and from what.

One for the life of an agent. Whoever supervises asks it for one worker after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ronde.launch.config import LaunchConfig
from ronde.launch.outputs import Complain, RunOutputs, WorkerOutput
from ronde.launch.plan import WorkerPlan
from ronde.net.processes import GroupLeader, Process

__all__ = ["Starter"]


class Starter:
    """Starts workers.

    `environment` is the launcher's own; `host` this machine's name if there are several nodes; `complain` shows what
    the user should know. Every worker inherits the descriptors `keep`. Raises UsageError if the configuration cannot be
    followed here. Close it when all workers are gone.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environment: Mapping[str, str],
        run_id: str,
        complain: Complain,
        *,
        host: str = "",
        keep: Sequence[int] = (),
    ) -> None:
        self._environment = environment
        self._keep = keep
        self._outputs = RunOutputs(config.outputs, run_id, complain, role=config.worker.role, host=host)

    def start(self, worker: WorkerPlan, attempt: int) -> tuple[GroupLeader, WorkerOutput]:
        """Start a worker in this attempt, which counts the rounds. Raises OSError if that is not possible."""
        output = self._outputs.worker(attempt, worker.rank, worker.local_rank)
        environment = {**self._environment, **worker.environment, **output.environment}
        with output.files() as (stdout, stderr):
            process = Process(worker.argv, environment, stdout=stdout, stderr=stderr, keep=self._keep)
        return process, output

    def close(self) -> None:
        """Remove what was only needed while workers ran."""
        self._outputs.close()
