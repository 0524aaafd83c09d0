"""The plan of `ronde run --launcher mpi`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ronde.errors import UsageError
from ronde.launch.mpi.mpirun import MpiPlan, plan_here, plan_mpi
from ronde.settings import JobKey

KEY = JobKey(bytes(32))


def plan(version: str, **more: Any) -> MpiPlan:
    terms: dict[str, Any] = {
        "environment": {},
        "cores": 8,
        "is_root": False,
        "libraries": [Path("/mpi/lib/libmpi.so.12.3"), Path("/mpi/lib/libmpi.so.12")],
        "job_key": KEY,
    }
    return plan_mpi(Path("/mpi/bin/mpirun"), version, ["python", "train.py"], 4, **(terms | more))


def test_options_are_those_of_the_mpi_that_is_there() -> None:
    words = plan("mpirun (Open MPI) 5.0.11").argv
    assert words[1:] == ("--oversubscribe", "-x", "RONDE_JOB_KEY", "-n", "4", "python", "train.py")
    assert "--allow-run-as-root" in plan("mpirun (Open MPI) 5.0.11", is_root=True).argv
    assert plan("HYDRA build details:", is_root=True).argv[1:] == ("-n", "4", "python", "train.py")


def test_mpi4py_loads_the_library_beside_mpirun() -> None:
    assert plan("").environment["MPI4PY_LIBMPI"] == "/mpi/lib/libmpi.so.12"
    assert "MPI4PY_LIBMPI" not in plan("", libraries=[]).environment


def test_what_the_user_has_set_stays() -> None:
    assert plan("").environment["OMP_NUM_THREADS"] == "2"
    mine = {"OMP_NUM_THREADS": "3", "MPI4PY_LIBMPI": "mine"}
    assert not set(plan("", environment=mine).environment) & set(mine)


def test_the_key_is_in_the_environment_and_never_shown() -> None:
    made = plan("")
    assert made.environment["RONDE_JOB_KEY"] == KEY.hex()
    assert KEY.hex() not in " ".join(made.argv) + made.describe() + repr(made)
    assert "/mpi/bin/mpirun -n 4 python train.py" in made.describe()


def test_there_is_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="there is no mpirun, neither next to this Python nor in PATH"):
        plan_here(["x"], 2, {"PATH": str(tmp_path)})
