"""torch.distributed with its Gloo backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from contestants import Call
from contestants.buffers import ping_pong, touched


def tensor(count: int) -> Any:
    return torch.from_numpy(touched(count))


class Gloo:
    """One rank of the default process group, found by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    backend = "gloo"

    def __init__(self) -> None:
        dist.init_process_group(self.backend)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def barrier(self, count: int = 0) -> Call:
        barrier: Call = dist.barrier
        return barrier

    def allreduce(self, count: int) -> Call:
        x = tensor(count)
        return lambda: dist.all_reduce(x)

    def allgather(self, count: int) -> Call:
        x, out = tensor(count // self.size), list(tensor(count).chunk(self.size))
        return lambda: dist.all_gather(out, x)

    def broadcast(self, count: int) -> Call:
        x = tensor(count)
        return lambda: dist.broadcast(x, 0)

    def reducescatter(self, count: int) -> Call:
        x, out = tensor(count), tensor(count // self.size)
        return lambda: dist.reduce_scatter_single(out, x)

    def alltoall(self, count: int) -> Call:
        x, out = tensor(count), tensor(count)
        return lambda: dist.all_to_all_single(out, x)

    def reduce(self, count: int) -> Call:
        x = tensor(count)
        return lambda: dist.reduce(x, 0)

    def gather(self, count: int) -> Call:
        x = tensor(count // self.size)
        out = list(tensor(count).chunk(self.size)) if self.rank == 0 else None
        return lambda: dist.gather(x, out, 0)

    def scatter(self, count: int) -> Call:
        x = list(tensor(count).chunk(self.size)) if self.rank == 0 else None
        out = tensor(count // self.size)
        return lambda: dist.scatter(out, x, 0)

    def sendrecv(self, count: int) -> Call:
        x, neighbour = tensor(count), self.rank ^ 1
        return ping_pong(self.rank, lambda: dist.send(x, neighbour), lambda: dist.recv(x, neighbour))
