"""The options of a function that runs on a cluster.

`ronde.spark.run`, `ronde.dask.run`, `ronde.flink.run` and the executor of `ronde.ray` have those that their engine can
offer, with the names and defaults of `RunOptions`, and pass them on as they are. `ronde.run` has the few that a job on
any cluster needs.
"""

from __future__ import annotations

import io
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TextIO

from ronde.errors import UsageError

__all__ = ["RunOptions"]

SECOND = 10**9
START_TIMEOUT_S = 600.0
ELASTIC_RESTARTS = 20  # by default: a function that always fails must not start again for ever
LAST_PORT = 65535


@dataclass(frozen=True)
class RunOptions:
    """How a function runs on a cluster.

    Attributes:
        num_proc: The number of workers, the ranks of the job; of an elastic job the largest number.
        min_num_proc: With how many an elastic job begins and goes on (None: the number is fixed).
        start_timeout: The time for all tasks to register, in seconds (600).
        elastic_timeout: The same after the loss of a task of an elastic job; the larger of both applies.
        reset_limit: How often workers of an elastic job are started again after one has failed (20). The next failure
            ends the job. The loss of a task is not one.
        env: Variables for the workers, which override those of their tasks (none).
        stdout: Takes the output of the workers (`sys.stdout`).
        stderr: Takes their errors, and the driver's messages (`sys.stderr`).
        verbose: 0 for no messages about the tasks that the driver awaits (1).
        nics: The names of the network interfaces by which the hosts reach each other, as a sequence or separated by
            commas (found out among all). The driver also listens there, if its machine has one of them.
        prefix_output_with_timestamp: Whether each line of output begins with the time (false).
        prefix: The template of the text before each line of output, with {rank}, {local_rank}, {host} and {stream}
            (`[host:rank] `).
        executable: The Python that runs agents and workers (that of their tasks).
        encrypt: Whether all connections are encrypted, also those with tensors (false). The setting `protection` does
            the same, in `env` or in the environment of this process.
        first_host: The name of the host that gets rank 0 (that of slot 0).
        driver_address: An address or a name by which tasks reach this machine, tried before those that it has itself,
            as behind a NAT (only those).
        driver_port: Where the driver listens for tasks; their agents come to the next port, too (any two ports).
        mpi_options: Start the workers by Open MPI's mpirun, with these further options (None: without MPI).

    Raises:
        UsageError: A value has the wrong type or is not possible.
    """

    num_proc: int
    min_num_proc: int | None = None
    start_timeout: float | None = None
    elastic_timeout: float | None = None
    reset_limit: int | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    verbose: int = 1
    nics: Sequence[str] | str | None = None
    prefix_output_with_timestamp: bool = False
    prefix: str | None = None
    executable: str | None = None
    encrypt: bool = False
    first_host: str = ""
    driver_address: str = ""
    driver_port: int = 0
    mpi_options: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("num_proc", "min_num_proc", "driver_port"):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, number))
        if self.min_num_proc is None and self.num_proc < 1:
            raise UsageError(f"num_proc={self.num_proc} is invalid: expected a whole number above 0")
        if not 1 <= self.least <= self.num_proc:
            raise UsageError(
                f"min_num_proc={self.least} is invalid: expected 1 to {self.num_proc}, the largest number of workers"
            )
        if not 0 <= self.driver_port < LAST_PORT:
            raise UsageError(
                f"driver_port={self.driver_port} is invalid: expected 1 to {LAST_PORT - 1}, because the next port is "
                "taken, too"
            )
        for seconds in (self.start_timeout, self.elastic_timeout):
            if seconds is not None and not (isinstance(seconds, Real) and 0 < seconds < math.inf):
                raise UsageError(
                    f"start_timeout={seconds!r} is invalid: expected a number of seconds above 0"
                )
        _check_environment(self.env or {})
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            is_binary = isinstance(stream, (io.RawIOBase, io.BufferedIOBase))
            if stream is not None and (is_binary or not callable(getattr(stream, "write", None))):
                raise UsageError(f"{name}={stream!r} takes no text: expected a file that is open for text")

    @property
    def least(self) -> int:
        """With how many workers the job begins."""
        return self.num_proc if self.min_num_proc is None else self.min_num_proc

    @property
    def start_timeout_ns(self) -> int:
        """The time for all tasks to register, in nanoseconds."""
        given = [each for each in (self.start_timeout, self.elastic_timeout) if each is not None]
        return int(max(given, default=START_TIMEOUT_S) * SECOND)

    @property
    def max_restarts(self) -> int:
        """How often workers are started again after one has failed: never, if their number is fixed."""
        if self.min_num_proc is None:
            return 0
        return ELASTIC_RESTARTS if self.reset_limit is None else self.reset_limit

    @property
    def interface(self) -> str | None:
        """The names of network interfaces, separated by commas; None for none."""
        return self.nics if isinstance(self.nics, str) else ",".join(self.nics or ()) or None


def _whole(name: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(f"{name}={number!r} is invalid: expected an integer") from None


def _check_environment(variables: Mapping[str, str]) -> None:
    """Raise UsageError for names and values that a process cannot have."""
    for name, value in variables.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"the environment has a variable {name!r}: expected a name without '='")
        if not isinstance(value, str) or "\0" in value:
            kind = "a null byte" if isinstance(value, str) else f"type {type(value).__name__}"
            raise UsageError(f"the environment's variable {name} has {kind}: expected an ordinary string")
