"""`ronde.spark.run(use_mpi=True)` on a real Spark with two executors: mpirun here, its daemon in an executor's task."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.clusters.rank_functions import computes, finds_key, leftovers, raises
from tests.clusters.spark_session import PATIENCE_S, session_of_two_executors
from tests.conformance.cluster_kinds import agents

from ronde.errors import UsageError, WorkerError
from ronde.net.addresses import addresses_here

pytest.importorskip("mpi4py", reason="mpi4py is not installed here")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here"),
    pytest.mark.skipif(not addresses_here(), reason="daemons of Open MPI need a network interface"),
]
spark: Any = pytest.importorskip("ronde.spark", reason="PySpark is not installed here")


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[None]:
    with session_of_two_executors():
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + PATIENCE_S
    while agents() or leftovers():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(fn: Any, *args: Any, **options: Any) -> list[Any]:
    given = {"stdout": io.StringIO(), "stderr": io.StringIO(), "num_proc": 2, "use_mpi": True, **options}
    results: list[Any] = spark.run(fn, args, **given)
    return results


def test_the_ranks_of_mpi_are_those_of_the_job() -> None:
    output, messages = io.StringIO(), io.StringIO()
    results = run(computes, 2, stdout=output, stderr=messages, extra_mpi_args="--mca btl_base_verbose 0")
    assert results == [(6.0, 0, 0, 0, 2, ""), (6.0, 1, 1, 1, 2, "")], messages.getvalue()
    lines = sorted(line.partition(":")[2] for line in output.getvalue().splitlines())
    assert lines == ["0] rank 0 is done", "1] rank 1 is done"]


def test_a_daemon_takes_the_agents_that_wait_for_the_next_job() -> None:
    assert run(len, "ranks", use_mpi=False) == [5, 5]
    assert [each[0] for each in run(computes, 2)] == [6.0, 6.0]
    assert run(len, "ranks", use_mpi=False) == [5, 5]


def test_an_exception_on_one_rank_ends_the_others() -> None:
    with pytest.raises(WorkerError, match="LookupError: no such column") as caught:
        run(raises)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert "in raises" in caught.value.traceback_text


def test_the_key_of_the_job_is_seen_nowhere() -> None:
    assert run(finds_key, num_proc=1) == [[]]


def test_contradictions_are_named() -> None:
    with pytest.raises(UsageError, match="use_gloo"):
        run(computes, 2, use_gloo=True)
    with pytest.raises(UsageError, match="extra_mpi_args"):
        run(computes, 2, use_mpi=None, extra_mpi_args="--verbose")
    with pytest.raises(UsageError, match="encrypted"):
        run(computes, 2, encrypt=True)
