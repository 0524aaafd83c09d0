"""Ronde's engine: named tensors by its NumPy functions, and the gradients of a model one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import ronde
from contestants import Call
from contestants.buffers import touched
from contestants.model_steps import BURST, ModelSteps, Parallel


class RondeEngine(ModelSteps):
    """One rank; all names are cached after their first use."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        ronde.init()
        self.rank, self.size = ronde.rank(), ronde.size()

    def barrier(self, count: int = 0) -> Call:
        x = touched(1)  # not ronde.barrier: that is negotiated every time
        return lambda: ronde.allreduce(x, "start", out=x)

    def single(self, count: int) -> Call:
        self.forget_steps()
        x, name = touched(count), f"single.{count}"
        return lambda: ronde.allreduce(x, name, op=ronde.Sum, out=x)

    def burst(self, count: int) -> Call:
        self.forget_steps()
        tensors = [(touched(count), f"burst.{i}") for i in range(BURST)]

        def call() -> None:
            for handle in [ronde.allreduce_async(x, name, op=ronde.Sum, out=x) for x, name in tensors]:
                handle.wait()

        return call

    def broadcast(self, count: int) -> Call:
        self.forget_steps()
        x = touched(count)
        return lambda: ronde.broadcast(x, 0, "broadcast", out=x)

    def allgather(self, count: int) -> Call:
        self.forget_steps()
        x = touched(count)
        return lambda: ronde.allgather(x, "allgather")

    def from_all(self, number: float) -> list[float]:
        return [float(each) for each in ronde.allgather(np.array([number]), "number")]

    def parallelize(self, model: Any, optimizer: Any) -> Parallel:
        """Submit all gradients after backward, the last one first, and wait for them."""
        weights = [(weight, name) for name, weight in model.named_parameters()][::-1]

        def synchronize() -> None:
            for handle in [ronde.allreduce_async(x.grad, name, out=x.grad) for x, name in weights]:
                handle.wait()

        optimizer.register_step_pre_hook(lambda *_: synchronize())
        return Parallel(model, optimizer, synchronize)
