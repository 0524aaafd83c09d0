"""Horovod's queries about the libraries that carry, or can carry, tensors (docs/backends.md)."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
import torch.distributed

from ronde.backends.ccl import is_installed
from ronde.engine import engine

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI at once, if MPI is in use. Raises no error."""
    module: Any = sys.modules.get("mpi4py.MPI")
    return bool(module and module.Is_initialized() and module.Query_thread() == module.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI carries operations of this process. Raises NotInitializedError before `init`."""
    return "mpi" in engine().backends()


def mpi_built() -> bool:
    """Return whether MPI can carry operations: whether mpi4py is installed. Raises no error."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether Gloo carries operations of this process. Raises NotInitializedError before `init`."""
    return "gloo" in engine().backends()


def gloo_built() -> bool:
    """Return whether Gloo can carry operations: whether this PyTorch contains it. Raises no error."""
    return bool(torch.distributed.is_available() and torch.distributed.is_gloo_available())


def nccl_built() -> int:
    """Return the version of NCCL, such as 22700 for 2.27.0; 0 without NCCL or a CUDA device. Raises no error."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False: Ronde does not support IBM's DDL. Raises no error."""
    return False


def ccl_built() -> bool:
    """Return whether oneCCL can carry operations: whether it is installed. Raises no error."""
    return is_installed()


def cuda_built() -> bool:
    """Return whether Ronde can reduce tensors on CUDA devices: whether there are any, and NCCL. Raises no error."""
    return nccl_built() > 0


def rocm_built() -> bool:
    """Return False: tensors on ROCm devices travel through main memory. Raises no error."""
    return False
