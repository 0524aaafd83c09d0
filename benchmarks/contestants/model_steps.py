"""Steps of a model, with communication and without, for every contestant that can combine gradients.

    resnet50, small*    forward, backward, wait until all gradients are averages over ranks; next to nothing to compute
    cnn, mlp            a whole step of training with momentum

These operations take True or False instead of a count: whether the step communicates. Both steps of a model are made
when it is first asked for, and are kept until another operation is; so is a check that communication does its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from contestants import Call
from contestants.models import Shape, SumOfSums, batches, cnn, mlp, resnet50_shapes, small_shapes

BURST = 100  # tensors of the operation `burst`
WARM_UP_STEPS = 3  # in the second one DDP arranges its buckets anew
CNN_BATCH: Shape = (16, 3, 32, 32)  # of one rank
MLP_BATCH: Shape = (4, 512)


class Parallel(NamedTuple):
    """A model that trains on many ranks."""

    model: Any  # to be called in its place
    optimizer: Any  # its step() sees averages
    synchronize: Call  # after backward: returns when gradients are averages; not to be called before step()


class Kept(NamedTuple):
    """A model's step with communication and without."""

    name: str
    together: Call
    alone: Call


def no_wait() -> None:
    """For gradients that are ready when backward ends."""


class ModelSteps:
    """The operations; a contestant says how to `parallelize` and how to have a number `from_all` ranks."""

    rank: int
    size: int
    _kept: Kept | None = None

    def parallelize(self, model: Any, optimizer: Any) -> Parallel:
        raise NotImplementedError

    def from_all(self, number: float) -> list[float]:
        raise NotImplementedError

    def resnet50(self, communicates: bool) -> Call:
        return self._step("resnet50", communicates, lambda: self._gradient_steps(resnet50_shapes()))

    def small(self, communicates: bool) -> Call:
        return self._step("small", communicates, lambda: self._gradient_steps(small_shapes()))

    def small_10000(self, communicates: bool) -> Call:
        return self._step("small_10000", communicates, lambda: self._gradient_steps(small_shapes(10_000)))

    def cnn(self, communicates: bool) -> Call:
        return self._step("cnn", communicates, lambda: self._training_steps(cnn, CNN_BATCH))

    def mlp(self, communicates: bool) -> Call:
        return self._step("mlp", communicates, lambda: self._training_steps(mlp, MLP_BATCH))

    def forget_steps(self) -> None:
        """Let go of the model; every other operation begins with it."""
        self._kept = None

    def _step(self, name: str, communicates: bool, make: Callable[[], tuple[Call, Call]]) -> Call:
        if self._kept is None or self._kept.name != name:
            self.forget_steps()
            self._kept = Kept(name, *make())
        return self._kept.together if communicates else self._kept.alone

    def _gradient_steps(self, shapes: list[Shape]) -> tuple[Call, Call]:
        def step(model: Any, synchronize: Call) -> Call:
            def call() -> None:
                model().backward()  # adds to the gradients in place: no step allocates memory
                synchronize()

            return call

        model = SumOfSums(shapes, self.rank + 1.0)
        parallel = self.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        together = step(parallel.model, parallel.synchronize)
        together()
        self._check_averages(model)
        for _ in range(WARM_UP_STEPS):
            together()
        alone = step(SumOfSums(shapes, self.rank + 1.0), no_wait)
        alone()
        return together, alone

    def _check_averages(self, model: Any) -> None:
        average = (1 + self.size) / 2
        for weight in model.parameters():
            if not torch.all(weight.grad == average):
                raise RuntimeError(f"a gradient is {weight.grad.flatten()[0]} instead of {average}")

    def _training_steps(self, build: Callable[[], Any], shape: Shape) -> tuple[Call, Call]:
        def step(model: Any, optimizer: Any) -> Call:
            draws, loss_of = batches(shape, self.rank), nn.CrossEntropyLoss()

            def call() -> None:
                images, labels = next(draws)
                optimizer.zero_grad()
                loss_of(model(images), labels).backward()
                optimizer.step()

            return call

        def start() -> tuple[Any, Any]:
            torch.manual_seed(0)  # the same parameters on every rank
            model = build()
            return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        model, optimizer = start()
        parallel = self.parallelize(model, optimizer)
        together = step(parallel.model, parallel.optimizer)
        for _ in range(WARM_UP_STEPS):
            together()
        self._check_equal(model)
        alone = step(*start())
        alone()
        return together, alone

    def _check_equal(self, model: Any) -> None:
        """Every rank has seen other data, so equal parameters show that it was averaged."""
        sums = self.from_all(sum(float(weight.detach().double().sum()) for weight in model.parameters()))
        if len(set(sums)) != 1:
            raise RuntimeError(f"parameters differ between ranks; their sums: {sums}")
