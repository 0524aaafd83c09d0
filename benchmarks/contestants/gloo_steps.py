"""torch.distributed with its Gloo backend: asynchronous operations, and DDP for models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from contestants import Call
from contestants.model_steps import BURST, ModelSteps, Parallel, no_wait
from contestants.torch_gloo import Gloo, tensor


class GlooSteps(Gloo, ModelSteps):
    """One rank; operations are numbered by the order of the program."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        super().__init__()

    def single(self, count: int) -> Call:
        self.forget_steps()
        x = tensor(count)
        return lambda: dist.all_reduce(x)

    def burst(self, count: int) -> Call:
        self.forget_steps()
        tensors = [tensor(count) for _ in range(BURST)]

        def call() -> None:
            for work in [dist.all_reduce(x, async_op=True) for x in tensors]:
                work.wait()

        return call

    def broadcast(self, count: int) -> Call:
        self.forget_steps()
        return super().broadcast(count)

    def allgather(self, count: int) -> Call:
        self.forget_steps()
        return super().allgather(count * self.size)

    def from_all(self, number: float) -> list[float]:
        numbers: list[Any] = [None] * self.size
        dist.all_gather_object(numbers, number)
        return numbers

    def parallelize(self, model: Any, optimizer: Any) -> Parallel:
        return Parallel(torch.nn.parallel.DistributedDataParallel(model), optimizer, no_wait)
