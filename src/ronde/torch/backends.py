"""What the data plane was built with: nothing but itself. Scripts ask; these are Horovod's questions."""

from __future__ import annotations

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
    """Whether MPI may be called by several threads. There is no MPI."""
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries the operations of this process."""
    return False


def mpi_built() -> bool:
    """Whether MPI could carry them."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo carries the operations of this process."""
    return False


def gloo_built() -> bool:
    """Whether Gloo could carry them."""
    return False


def nccl_built() -> int:
    """The version of NCCL that could carry them, 0 for none."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL could carry them."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL could carry them."""
    return False


def cuda_built() -> bool:
    """Whether tensors are reduced on CUDA devices. They travel through main memory."""
    return False


def rocm_built() -> bool:
    """Whether tensors are reduced on ROCm devices. They travel through main memory."""
    return False
