"""The backend `mpi`: MPI through mpi4py, for jobs under `mpirun` or `ronde run --launcher mpi`.

MPI cannot be interrupted, and a process must not call it after a failure. So no call here blocks inside MPI: operations
are begun, and tested until they end or the world has failed. After a failure this process makes no more calls of MPI,
nor finalizes it at the end, because that would wait for dead ranks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ronde.backends.backend import Backend, BackendContext, at_exit
from ronde.environment import environment
from ronde.types import DType, Kind, ReduceOp

__all__ = ["MPI"]


class _MpiProcess:
    """The state of MPI in this process; one instance, below."""

    module: Any = None  # mpi4py.MPI
    is_ours: bool = False  # Ronde imported it first, and finalizes it
    has_failed: bool = False
    operations: dict[ReduceOp, Any]
    communicators: dict[tuple[int, ...], Any]  # by members; freeing them would need all of them
    pending: list[Any]  # operations that a failure has interrupted, with their memory


_process = _MpiProcess()
_process.operations, _process.communicators, _process.pending = {}, {}, []


class MPI(Backend):
    """A communicator of MPI, separate from MPI.COMM_WORLD."""

    name = "mpi"

    def __init__(self, place: BackendContext) -> None:
        super().__init__(place)
        self._comm: Any = None

    def missing(self) -> str | None:
        if _process.has_failed:
            return "MPI has failed in this process before and cannot be used again"
        if self.place.size > 1 and "mpi4py.MPI" not in sys.modules and not _has_launcher():
            return (
                "mpirun has not started it: use mpirun, or ronde run --launcher mpi"  # MPI would run it alone
            )
        try:
            mpi = _load_mpi()
        except (ImportError, RuntimeError) as error:
            return f"mpi4py cannot be imported ({_first_line(error)})"
        if mpi.Is_finalized():
            return "MPI has been finalized in this process"
        level = mpi.Query_thread()
        if level < mpi.THREAD_SERIALIZED:
            return (
                "MPI was initialized for one thread only, but the engine has a separate thread: it needs "
                "MPI_THREAD_SERIALIZED, or MPI_THREAD_MULTIPLE if the program calls MPI too"
            )
        world, mine = mpi.COMM_WORLD, self.place.members[self.place.rank]
        if max(self.place.members) >= world.Get_size() or world.Get_rank() != mine:
            return (
                f"in MPI it is rank {world.Get_rank()} of {world.Get_size()}: start the job by mpirun, or by "
                "ronde run --launcher mpi"
            )
        return None

    def open(self) -> None:
        mpi, members = _load_mpi(), self.place.members
        if members not in _process.communicators:
            group = mpi.COMM_WORLD.Get_group().Incl(members)
            _process.communicators[members] = mpi.COMM_WORLD.Create_group(group)
        self._comm = _process.communicators[members]

    def close(self, failed: bool) -> None:
        self._comm = None
        if failed:
            _process.has_failed = True

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        return True

    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        source = _process.module.IN_PLACE if x is out else x
        self._await_request("allreduce", self._comm.Iallreduce(source, out, _process.operations[op]), x, out)

    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        request = self._comm.Ireduce_scatter(x, out, counts, _process.operations[op])
        self._await_request("reducescatter", request, x, out)

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        request = self._comm.Iallgatherv(x, [out, sizes, _offsets(sizes), _process.module.BYTE])
        self._await_request("allgather", request, x, out)

    def broadcast(self, data: Any, root: int) -> None:
        self._await_request("broadcast", self._comm.Ibcast(data, root), data)

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        byte = _process.module.BYTE
        sent, received = [x, in_sizes, _offsets(in_sizes), byte], [out, out_sizes, _offsets(out_sizes), byte]
        self._await_request("alltoall", self._comm.Ialltoallv(sent, received), x, out)

    def barrier(self) -> None:
        self._await_request("barrier", self._comm.Ibarrier())

    def _await_request(self, operation: str, request: Any, *memory: Any) -> None:
        """Test an operation until it ends. Raises the errors of Patience."""
        if request.Test():
            return
        patience = self.place.patience(f"{operation} by mpi")
        try:
            patience.wait_until(request.Test)
        except BaseException:
            _process.has_failed = True
            _process.pending.append((request, memory))
            raise


def _has_launcher() -> bool:
    """Return whether the environment has variables of an MPI launcher."""
    return any(name.startswith(("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HYDI_")) for name in environment())


def _load_mpi() -> Any:
    if _process.module is None:
        _process.is_ours = "mpi4py.MPI" not in sys.modules
        if _process.is_ours:
            import mpi4py

            mpi4py.rc.finalize = False
        _process.module = module = importlib.import_module("mpi4py.MPI")
        _process.operations = dict(
            zip(
                ReduceOp,
                (
                    *(module.SUM, None, module.MIN, module.MAX, module.PROD),
                    *(module.BAND, module.BOR, module.BXOR),
                ),
            )
        )
        at_exit(_finalize_mpi)
    return _process.module


def _finalize_mpi() -> None:
    """Finalize or abort MPI at the end of the process, after the engine has shut down."""
    module = _process.module
    if module.Is_finalized():
        return
    if not _process.has_failed:
        if _process.is_ours:
            module.Finalize()
    elif not _process.is_ours:
        module.COMM_WORLD.Abort(1)  # otherwise mpi4py would finalize MPI, and wait for ever


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
