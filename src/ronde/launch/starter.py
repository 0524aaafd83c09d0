"""How the workers of one node are started: with which output, on which cores, and from what.

One for the life of an agent. Whoever supervises asks it for one worker after the other. Where they may have to be
started again, `prepare` makes a template meanwhile; without one that can be used, each worker is a fresh process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ronde.launch.config import LaunchConfig
from ronde.launch.outputs import Complain, RunOutputs, WorkerOutput
from ronde.launch.plan import WorkerPlan
from ronde.net.processes import GroupLeader, Process

if TYPE_CHECKING:
    from ronde.launch.template import Template

__all__ = ["Starter"]

IMPORTS_NS = 120 * 10**9  # for which workers that are to come from a template wait for it


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
        self._complain = complain
        self._spec = config.worker
        self._template: Template | None = None
        self._said = False  # why it cannot be used
        self._outputs = RunOutputs(config.outputs, run_id, complain, role=config.worker.role, host=host)

    def start(self, worker: WorkerPlan, attempt: int) -> tuple[GroupLeader, WorkerOutput]:
        """Start a worker in this attempt, which counts the rounds. Raises OSError if that is not possible."""
        output = self._outputs.worker(attempt, worker.rank, worker.local_rank)
        environment = {**self._environment, **worker.environment, **output.environment}
        if self._spec.fork and self._template is None:
            self.prepare(worker)
            if self._template is not None:
                self._template.is_ready(time.monotonic_ns() + IMPORTS_NS)
        with output.files() as (stdout, stderr):
            process = self._from_template(worker.argv, environment, stdout, stderr)
            if process is None:
                process = Process(worker.argv, environment, stdout=stdout, stderr=stderr, keep=self._keep)
        return process, output

    def prepare(self, worker: WorkerPlan) -> None:
        """Begin to make a template of such workers, if that is wanted and possible."""
        if self._template is not None or self._spec.preload == ():
            return
        from ronde.launch.template import Template, command_of  # only for jobs that may need it

        if command_of(worker.argv) is None:
            return
        try:
            environment = {**self._environment, **worker.environment}
            self._template = Template(worker.argv, environment, self._spec.preload)
        except OSError as error:
            self._complain(f"there is no template for restarts: {error.strerror or error}")

    def _from_template(
        self, argv: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> GroupLeader | None:
        template = self._template
        if template is None:
            return None
        process = template.start(argv, environment, stdout=stdout, stderr=stderr, keep=self._keep)
        if template.problem and not self._said:
            self._said = True
            self._complain(
                f"workers do not come from the template, but do their own imports: {template.problem}"
            )
        return process

    def close(self) -> None:
        """Let go of what was only needed while workers ran."""
        if self._template is not None:
            self._template.close()
        self._outputs.close()
