"""`SGD`: steps along the gradients of small batches of rows.

The rows of a block are shuffled for each pass, and dealt out to the batches in turn: the same for any number of tasks.
Each batch gets an even share of each block; the rows of a block with fewer of them than there are batches are in random
ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.ml.optimizers.descent import pseudo_gradient
from ronde.ml.optimizers.objective import SummedObjective
from ronde.ml.optimizers.optimizer import Optimizer, SearchState

__all__ = ["MiniBatches", "SGD"]

Array = NDArray[Any]


class SGD(Optimizer):
    """Stochastic gradient descent: in each step of the result's history it goes once through all rows, in batches.

    Batches are drawn at random from all rows, the same ones for any number of tasks. With the penalty l1, weights that
    a step would carry over 0 become 0.

    Args:
        max_iter: The largest number of passes over the rows.
        tol: It ends when the mean loss of a pass has not fallen by this part of the best one (0: it does not).
        patience: For how many passes that has to be so.
        batch_size: The number of rows of a batch.
        learning_rate: The factor of the gradient; or a function that returns it for the number of a batch, from 0.
        decay: A number's rate at batch k is `learning_rate / (1 + decay * k)`.
        momentum: The part of the last step that is added to the next, from 0 to below 1.
        average: Whether the result is the mean of the weights after all batches from the second pass on.
        seed: Of the random numbers.
    """

    def __init__(
        self,
        max_iter: int = 100,
        tol: float = 1e-4,
        *,
        patience: int = 5,
        batch_size: int = 256,
        learning_rate: float | Callable[[int], float] = 0.1,
        decay: float = 0.0,
        momentum: float = 0.0,
        average: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(max_iter, tol)
        if batch_size < 1 or patience < 1:
            raise UsageError(f"batch_size={batch_size} or patience={patience} is invalid: expected 1 or more")
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum={momentum} is invalid: expected 0 or more, and less than 1")
        self.patience, self.batch_size, self.learning_rate = patience, batch_size, learning_rate
        self.decay, self.momentum, self.average, self.seed = decay, momentum, average, seed

    def first_memory(self) -> _SGDMemory:
        return _SGDMemory()

    def advance(self, search: SearchState, total: SummedObjective) -> None:
        memory: _SGDMemory = search.memory
        num_batches = -(-total.num_rows // self.batch_size)
        batches = MiniBatches(self.seed, memory.passes, num_batches)
        factors = total.l1_factors(search.w)
        w = search.w if memory.w is None else memory.w
        velocity, mean, rate = memory.velocity, np.zeros_like(w), 0.0
        for number in range(num_batches):
            loss, gradient = total.batch_loss_and_gradient(w, functools.partial(batches.rows, number))
            if not np.isfinite(loss):
                search.loss = loss
                return
            rate = self._rate(memory.passes * num_batches + number)
            velocity = self.momentum * velocity - rate * gradient
            w = shrunk(w + velocity, rate * factors)
            mean += (w - mean) / (number + 1)
        memory.w, memory.velocity, memory.passes = w, velocity, memory.passes + 1
        if self.average and memory.passes > 1:
            search.w = mean if memory.passes == 2 else search.w + (mean - search.w) / (memory.passes - 1)
        else:
            search.w = w
        search.loss, gradient = total.loss_and_gradient(search.w)
        search.record(total.gradient_norm(pseudo_gradient(search.w, gradient, factors)), rate)
        if memory.has_stopped_improving(search.loss, self.tol, self.patience):
            search.reason = "loss"

    def _rate(self, batch: int) -> float:
        if callable(self.learning_rate):
            return float(self.learning_rate(batch))
        return self.learning_rate / (1 + self.decay * batch)


@dataclass
class _SGDMemory:
    """What SGD remembers from pass to pass. `w`: of the last batch, which an average leaves out of `search`."""

    w: Array | None = None
    velocity: Any = 0.0
    passes: int = 0
    best_loss: float = math.inf
    passes_without_improvement: int = 0

    def has_stopped_improving(self, loss: float, tol: float, patience: int) -> bool:
        """Note the loss after a pass, and return whether it has stopped falling."""
        is_better = loss < self.best_loss - tol * abs(self.best_loss) or math.isinf(self.best_loss)
        self.passes_without_improvement = 0 if is_better else self.passes_without_improvement + 1
        self.best_loss = min(loss, self.best_loss)
        return tol > 0 and self.passes_without_improvement >= patience


def shrunk(w: Array, by: Array) -> Array:
    """Return the weights with absolute values smaller by this much, but not below 0: the step of the penalty l1."""
    result: Array = w - np.clip(w, -by, by)
    return result


class MiniBatches:
    """The batches of one pass.

    Args:
        seed: Of the random numbers.
        pass_no: The number of the pass.
        num_batches: How many batches there are.
    """

    def __init__(self, seed: int, pass_no: int, num_batches: int) -> None:
        self._seed, self._pass_no, self._num_batches = seed, pass_no, num_batches
        self._shuffled: dict[int, tuple[int, NDArray[Any]]] = {}

    def rows(self, batch: int, block: int, num_rows: int) -> NDArray[Any]:
        """Return the indices of the rows of a block that are in a batch. `num_rows`: of the block."""
        if block not in self._shuffled:
            random = np.random.default_rng([self._seed, self._pass_no, block])
            self._shuffled[block] = int(random.integers(self._num_batches)), random.permutation(num_rows)
        offset, shuffled = self._shuffled[block]
        begin, end = ((num_rows * number + offset) // self._num_batches for number in (batch, batch + 1))
        return shuffled[begin:end]
