"""How a function gets from the driver to the agents, and the results back: through the store of the job.

Workers reach this store, too, to leave what must outlive their job.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Protocol

from ronde.environment import environment
from ronde.errors import RondeError, UsageError
from ronde.job_key import JobKey
from ronde.launch.agent.agent import RunResult
from ronde.launch.calls import CallFiles
from ronde.stores.store import Store, delete_large, get_large, put_large
from ronde.stores.tcp import StoreClient

__all__ = [
    "DRIVER_STORE",
    "JobMemory",
    "call_of_job",
    "connect_to_driver",
    "fetch_result",
    "offer_call",
    "send_results",
]

DRIVER_STORE = "RONDE_DRIVER_STORE"  # for workers: where the agent has reached the store
CALL = "call"
SPOOLED_BYTES = 64 << 20  # larger results wait in a file


class JobMemory(Protocol):
    """Values that outlive a job, in the memory of the driver."""

    def offer_to(self, store: Store) -> None:
        """Write the values into the store of a job that begins."""

    def collect_from(self, store: Store) -> None:
        """Read the values from the store of a job that has failed. Its workers have ended at any moment."""


def connect_to_driver(timeout_ns: int) -> StoreClient:
    """Return the store of this worker's job.

    Raises UsageError outside of a cluster's job, TimeoutError if the driver does not answer in time.
    """
    variables = environment()
    try:
        address, key = variables[DRIVER_STORE], JobKey.from_hex(variables["RONDE_JOB_KEY"])
    except KeyError as error:
        raise UsageError(
            f"there is no driver, because {error} is not set: run in a task of a cluster"
        ) from None
    return StoreClient(address, key, timeout_ns)


def offer_call(store: Store, packed: bytes) -> None:
    """Write the call (`calls.pack_call`) into the store."""
    put_large(store, CALL, packed)


def call_of_job(store: Store, timeout_ns: int) -> Iterator[bytes]:
    """Return the call in pieces."""
    return get_large(store, CALL, timeout_ns)


def send_results(store: Store, files: CallFiles, result: RunResult) -> None:
    """Write what the workers of this agent have left: results, or the exceptions of those that failed."""
    for worker, rank in enumerate(sorted(result.returncodes)):
        if result.exit_code == 0 or rank in result.failures:
            with files.open_result(worker) as file:
                put_large(store, _result(rank), file)


def fetch_result(store: Store, rank: int, timeout_ns: int = 0) -> BinaryIO | None:
    """Return the file with the result of a rank, as `calls` reads it, and delete it in the store; None without one."""
    import tempfile  # slow to load, and agents do not need it

    try:
        pieces = get_large(store, _result(rank), timeout_ns)
        file = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115
        file.writelines(pieces)
    except RondeError:
        return None
    delete_large(store, _result(rank))
    file.seek(0)
    return file  # type: ignore[return-value]


def _result(rank: int) -> str:
    return f"results/{rank}"
