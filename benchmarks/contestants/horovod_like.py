"""`ronde.torch` and `horovod.torch`: the same program for both."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from contestants import Call
from contestants.model_steps import BURST, ModelSteps, Parallel
from contestants.torch_gloo import tensor


class HorovodLike(ModelSteps):
    """One rank of a module with the names of `horovod.torch`."""

    module: str

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._hvd: Any = importlib.import_module(self.module)
        self._hvd.init()
        self.rank, self.size = self._hvd.rank(), self._hvd.size()

    def barrier(self, count: int = 0) -> Call:
        # Not barrier(): that is negotiated every time.
        x, hvd = (tensor(1), self._hvd)
        return lambda: hvd.allreduce_(x, name="start", op=hvd.Sum)

    def single(self, count: int) -> Call:
        self.forget_steps()
        x, name, hvd = tensor(count), f"single.{count}", self._hvd
        return lambda: hvd.allreduce_(x, name=name, op=hvd.Sum)

    def burst(self, count: int) -> Call:
        self.forget_steps()
        tensors, hvd = [(tensor(count), f"burst.{i}") for i in range(BURST)], self._hvd

        def call() -> None:
            for handle in [hvd.allreduce_async_(x, name=name, op=hvd.Sum) for x, name in tensors]:
                hvd.synchronize(handle)

        return call

    def broadcast(self, count: int) -> Call:
        self.forget_steps()
        x, hvd = tensor(count), self._hvd
        return lambda: hvd.broadcast_(x, 0, name="broadcast")

    def allgather(self, count: int) -> Call:
        self.forget_steps()
        x, hvd = tensor(count), self._hvd
        return lambda: hvd.allgather(x, name="allgather")

    def from_all(self, number: float) -> list[float]:
        gathered: list[float] = self._hvd.allgather(torch.tensor([number]).double(), name="number").tolist()
        return gathered

    def parallelize(self, model: Any, optimizer: Any) -> Parallel:
        hvd = self._hvd
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return Parallel(model, optimizer, optimizer.synchronize)


class RondeTorch(HorovodLike):
    module = "ronde.torch"


class Horovod(HorovodLike):
    module = "horovod.torch"
