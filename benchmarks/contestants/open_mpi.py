"""Open MPI by mpi4py."""

from __future__ import annotations

from mpi4py import MPI

from contestants import Call
from contestants.buffers import ping_pong, touched


class OpenMPI:
    """One rank of MPI.COMM_WORLD; started by mpirun."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def barrier(self, count: int = 0) -> Call:
        return self._comm.Barrier

    def allreduce(self, count: int) -> Call:
        x, allreduce = touched(count), self._comm.Allreduce
        return lambda: allreduce(MPI.IN_PLACE, x)

    def allgather(self, count: int) -> Call:
        x, out, allgather = touched(count // self.size), touched(count), self._comm.Allgather
        return lambda: allgather(x, out)

    def broadcast(self, count: int) -> Call:
        x, broadcast = touched(count), self._comm.Bcast
        return lambda: broadcast(x)

    def reducescatter(self, count: int) -> Call:
        x, out, reduce_scatter = touched(count), touched(count // self.size), self._comm.Reduce_scatter_block
        return lambda: reduce_scatter(x, out)

    def alltoall(self, count: int) -> Call:
        x, out, alltoall = touched(count), touched(count), self._comm.Alltoall
        return lambda: alltoall(x, out)

    def reduce(self, count: int) -> Call:
        x, reduce = touched(count), self._comm.Reduce
        out = touched(count) if self.rank == 0 else None
        return lambda: reduce(x, out)

    def gather(self, count: int) -> Call:
        x, gather = touched(count // self.size), self._comm.Gather
        out = touched(count) if self.rank == 0 else None
        return lambda: gather(x, out)

    def scatter(self, count: int) -> Call:
        x = touched(count) if self.rank == 0 else None
        out, scatter = touched(count // self.size), self._comm.Scatter
        return lambda: scatter(x, out)

    def sendrecv(self, count: int) -> Call:
        x, neighbour = touched(count), self.rank ^ 1
        return ping_pong(
            self.rank, lambda: self._comm.Send(x, neighbour), lambda: self._comm.Recv(x, neighbour)
        )
