"""MPI on a cluster: real daemons of Open MPI in tasks on this machine (several hosts: tests/hosts)."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.rank_functions import computes, kills, leftovers, raises
from tests.clusters.spark_session import ROOT
from tests.conformance.cluster_kinds import agents

import ronde
from ronde.errors import TimeoutError, UsageError, WorkerError
from ronde.launch.clusters.local import LocalCluster
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions
from ronde.net.addresses import addresses_here

pytest.importorskip("mpi4py", reason="mpi4py is not installed here")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun here"),
    pytest.mark.skipif(not addresses_here(), reason="daemons of Open MPI need a network interface"),
]

SOON_S = 120  # on a quiet machine it takes a second


@pytest.fixture(autouse=True)
def nothing_of_mpi_is_left() -> Iterator[None]:
    """Fails a test after which agents or processes or directories of MPI are left."""
    before = folders()
    yield
    deadline = time.monotonic() + 60
    while agents() or leftovers() or folders() - before:
        assert time.monotonic() < deadline, (agents(), leftovers(), folders() - before)
        time.sleep(0.05)


def folders() -> set[Path]:
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    names = ["ronde-mpi-*", "prte*", "ompi.*", "sm_segment.*"]
    return {found for place in places for name in names for found in place.glob(name)}


def run(cluster: LocalCluster, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    output: dict[str, Any] = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    given = RunOptions(2, mpi_options=(), **{**output, **options})
    return run_function(cluster, fn, args, {}, given)


def test_the_ranks_of_mpi_are_those_of_the_job() -> None:
    output = io.StringIO()
    results = run(LocalCluster(2), computes, 2, stdout=output)
    assert results == [(6.0, 0, 0, 0, 2, ""), (6.0, 1, 1, 1, 2, "")]
    lines = sorted(line.partition(":")[2] for line in output.getvalue().splitlines())
    assert lines == ["0] rank 0 is done", "1] rank 1 is done"]


def test_an_exception_on_one_rank_ends_the_others() -> None:
    with pytest.raises(WorkerError, match="LookupError: no such column") as caught:
        run(LocalCluster(2), raises)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert "in raises" in caught.value.traceback_text


@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        ("rank", "rank 1 .* SIGKILL"),
        ("prterun", r"mpirun \(pid \d+\) was killed by SIGKILL"),  # mpirun becomes it
        ("prted", "its agent ended with exit code|mpirun .*ended|connection.* broke"),
        ("ronde.launch.clusters.local", "connection.* broke|its process ended"),
    ],
)
def test_a_killed_process_is_an_error_at_the_driver(victim: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=reason):
        run(LocalCluster(2), kills, victim, tmp_path)
    assert time.monotonic() - float((tmp_path / "killed").read_text()) < SOON_S


_DRIVER = """
from pathlib import Path
from tests.clusters.rank_functions import waits_for_death
from ronde.launch.clusters.local import LocalCluster
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions
run_function(LocalCluster(2), waits_for_death, (Path({folder!r}),), {{}}, RunOptions(2, mpi_options=()))
"""


def test_nothing_keeps_running_after_the_driver_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _DRIVER.format(folder=str(tmp_path))]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + SOON_S
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        driver.kill()
    for name in tmp_path.iterdir():
        while Path(f"/proc/{name.name}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_too_few_slots_are_an_error_with_numbers() -> None:
    with pytest.raises(TimeoutError, match="this machine has 1 slots, 0 of them free"):
        run(LocalCluster(1), computes, 2, start_timeout=1)


def test_what_contradicts_mpi_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="encrypted"):
        run(LocalCluster(2), computes, 2, encrypt=True)
    with pytest.raises(UsageError, match="elastic"):
        run(LocalCluster(2), computes, 2, min_num_proc=1)
    with pytest.raises(UsageError, match="ronde run --launcher mpi"):
        ronde.run(computes, (2,), use_mpi=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="there is no mpirun"):
        run(LocalCluster(2), computes, 2)
