"""`horovod.runner.mpi_run`: which MPI is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import NoReturn

from .. import missing_from  # noqa: TID252 - type checkers do not know a package horovod

__all__ = ["is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "mpi_available"]

# By what `mpirun --version` prints. Intel MPI is made of MPICH's parts, so it comes first.
_NAMES = {"Intel": ("Intel(R) MPI",), "Spectrum": ("IBM Spectrum MPI",), "Open": ("Open MPI", "OpenRTE")}
_NAMES["MPICH"] = ("MPICH", "HYDRA")


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether there is an `mpirun` of a known MPI. `env`: the environment in which it would run (None: this)."""
    return _installed_mpi(env) != ""


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of Open MPI."""
    return _installed_mpi(env) == "Open"


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of IBM Spectrum MPI."""
    return _installed_mpi(env) == "Spectrum"


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of MPICH."""
    return _installed_mpi(env) == "MPICH"


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of Intel MPI."""
    return _installed_mpi(env) == "Intel"


def _installed_mpi(env: Mapping[str, str] | None) -> str:
    try:
        done = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=True, env=env, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = (mpi for mpi, words in _NAMES.items() if any(word in done.stdout for word in words))
    return next(found, "")


def __getattr__(name: str) -> NoReturn:
    raise missing_from("horovod.runner.mpi_run", name)
