"""What Horovod calls basics: `init` and `join` with its arguments, and queries about the libraries that carry tensors.

docs/backends.md describes these libraries.
"""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed

from ronde.backends.ccl import is_installed
from ronde.comm.world import has_joined, size
from ronde.engine import engine, process
from ronde.engine.process import ProcessSet
from ronde.errors import UsageError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "join",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
    **how: Any,
) -> None:
    """Join the world: connect this process with all other ranks of the job, and start the engine.

        hvd.init()
        print("rank", hvd.rank(), "of", hvd.size())

    All ranks call it, before any other function. It returns when all have joined; a second call does nothing.

    Args:
        comm: the list of all ranks, or None. For some of the ranks, use process sets.
        process_sets: process sets, or lists of their ranks, to add (None or "dynamic": none yet).
        how: arguments of `ronde.init`: `rank`, `size`, `store`, `init_method` and settings.

    Raises:
        UsageError: an argument or variable is invalid.
        TimeoutError: ranks are missing after `start_timeout_ns` (default: 300 s); the error names them.
        AuthenticationError: another rank has another job key.
    """
    wanted = None if comm is None else _ranks(comm)
    was_initialized = has_joined()
    process.init(process_sets=process_sets, **how)
    if wanted and sorted(wanted) != list(range(size())):
        there = size()
        if not was_initialized:
            process.shutdown()
        raise UsageError(
            f"comm={wanted} are not all {there} ranks that were started: for some of them make a process set, "
            f"hvd.init(process_sets=[hvd.ProcessSet({wanted})])"
        )


def join(device: int = -1) -> int:
    """Wait, without data, until all ranks have called `join`; return the last rank that called it, on all ranks.

        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)

    Until then this rank contributes zeros to the operations of the other ranks, so that their optimizers continue. Its
    own parameters do not change.

    Args:
        device: has no effect; Horovod's scripts pass it.

    Raises:
        UsageError: another thread has called it.
        PeerLostError: a rank died, left or cannot be reached.
    """
    operator.index(device)
    return process.join()


def _ranks(comm: object) -> list[int]:
    try:
        return [operator.index(rank) for rank in comm]  # type: ignore[attr-defined]
    except TypeError:
        raise UsageError(
            f"comm must be a list of ranks or None, not {comm!r}: the ranks are those that were started together"
        ) from None


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
