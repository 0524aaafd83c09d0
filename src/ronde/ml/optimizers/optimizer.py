"""`Optimizer`: what all optimizers share, the iteration around their steps, and its result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep, iterate
from ronde.errors import UsageError
from ronde.ml.optimizers.objective import Objective, SummedObjective
from ronde.ml.tasks import SingleThreadedStep, one_blas_thread

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["Optimizer", "OptimizerResult", "SearchState"]

Array = NDArray[Any]

Record = dict[str, float]

MAX_ITER = "max_iter"  # the reason if the steps end before another reason is there


@dataclass(frozen=True)
class OptimizerResult:
    """What an optimizer has found.

    Attributes:
        w: The weights.
        loss: The objective there: mean loss and penalties.
        history: One record for each step: `step` (from 1), `loss`, `gradient_norm` (the largest component) and
            `step_length`, all after the step.
        converged: Whether w is a minimum within the tolerance.
        reason: Why it ended: "gradient" (its norm is within `tol`), "loss" (it changes no more), "precision" (no step
            decreases the loss, within rounding errors), "no decrease" (no step does, but the gradient is not small:
            there is a kink, or the gradient is wrong), "report" (this function ended it) or "max_iter".
        n_iter: The number of steps.
    """

    w: Array
    loss: float
    history: list[Record]
    converged: bool
    reason: str
    n_iter: int


@dataclass
class SearchState:
    """Where an optimizer is; the same on all tasks.

    `gradient`: of the smooth part, None before the first evaluation; `memory`: what the optimizer remembers beside it;
    `reason`: why it has ended, None while it goes on.
    """

    w: Array
    memory: Any
    loss: float = math.nan
    gradient: Array | None = None
    total_weight: float | None = None
    history: list[Record] = field(default_factory=list)
    reason: str | None = None

    def record(self, gradient_norm: float, step_length: float) -> None:
        """Add the record of a step."""
        self.history.append(
            {
                "step": len(self.history) + 1,
                "loss": self.loss,
                "gradient_norm": gradient_norm,
                "step_length": step_length,
            }
        )


class Optimizer(ABC):
    """Finds the weights at which an objective is least.

    Args:
        max_iter: The largest number of steps.
        tol: The largest component of the gradient at which it ends.
    """

    def __init__(self, max_iter: int = 100, tol: float = 1e-6) -> None:
        if max_iter < 1:
            raise UsageError(f"max_iter={max_iter} is invalid: expected 1 or more")
        self.max_iter, self.tol = max_iter, tol

    @abstractmethod
    def first_memory(self) -> Any:
        """Return what the optimizer remembers before the first step. Raises nothing."""

    @abstractmethod
    def advance(self, search: SearchState, total: SummedObjective) -> None:
        """Take one step. All tasks do it at once.

        Args:
            search: Where the optimizer is; it changes this.
            total: The objective, summed over the rows of all tasks.

        Raises:
            RondeError: A task has ended, or tasks differ.
        """

    def check(self, objective: Objective) -> None:
        """Return if the optimizer can minimize an objective.

        Args:
            objective: The function.

        Raises:
            UsageError: It cannot.
        """
        for name in ("l1", "l2"):
            if not 0 <= getattr(objective, name) < math.inf:
                raise UsageError(
                    f"{name}={getattr(objective, name)} is invalid: expected a number, 0 or more"
                )

    def minimize(
        self,
        objective: Objective,
        data: Any,
        start: Any,
        *,
        on: str | Cluster | None = None,
        report: Callable[[Record, Array], Any] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_folder: str | None = None,
        rows_per_block: int = 1,
    ) -> OptimizerResult:
        """Return the weights at which the objective is least. The result has the same bits for any number of tasks.

        Args:
            objective: The function.
            data: The rows, as of `ronde.comqueue.iterate`.
            start: The first weights, of any shape.
            on: Where the tasks run, as of `iterate`.
            report: Gets the record of each step and w on task 0, for example `print` (None: nothing does). It ends the
                iteration by returning True.
            checkpoint_every: As of `iterate`.
            checkpoint_folder: As of `iterate`.
            rows_per_block: As of `iterate`.

        Raises:
            FloatingPointError: The loss is no finite number at the start, or has become so.
            RemoteError: The objective failed on a task, or a task ended.
            UsageError: An argument is invalid.
        """
        self.check(objective)
        w = np.array(start, np.float64)
        with one_blas_thread():  # for all steps of tasks that are threads
            ended = iterate(
                SingleThreadedStep(_Step(self, objective, report)),
                data=data,
                state={"search": SearchState(w, self.first_memory())},
                max_iter=self.max_iter,
                on=on,
                checkpoint_every=checkpoint_every,
                checkpoint_folder=checkpoint_folder,
                rows_per_block=rows_per_block,
            )
        return self._result(ended.state.search)

    def _result(self, search: SearchState) -> OptimizerResult:
        if not math.isfinite(search.loss):
            raise FloatingPointError(
                f"{type(self).__name__}: the loss is {search.loss} after {len(search.history)} steps. Check the "
                "data for NaN, infinity and very large numbers; with a learning rate, try a smaller one"
            )
        reason = search.reason or MAX_ITER
        return OptimizerResult(
            w=search.w,
            loss=search.loss,
            history=search.history,
            converged=reason in ("gradient", "loss", "precision"),
            reason=reason,
            n_iter=len(search.history),
        )


class _Step:
    """The step function of the iteration."""

    def __init__(
        self, optimizer: Optimizer, objective: Objective, report: Callable[[Record, Array], Any] | None
    ) -> None:
        self._optimizer, self._objective, self._report = optimizer, objective, report
        self.__qualname__ = f"{type(optimizer).__name__} of {type(objective).__name__}"  # for errors

    def __call__(self, c: IterationStep) -> None:
        search: SearchState = c.state.search
        if search.total_weight is None:
            search.w = search.w.copy()  # it is a view of memory that has the rows, too
        steps = len(search.history)
        total = SummedObjective(self._objective, c, search.total_weight)
        search.total_weight = total.total_weight
        self._optimizer.advance(search, total)
        if self._report is not None and c.task_id == 0 and len(search.history) > steps:
            if self._report(search.history[-1], search.w) is True:
                search.reason = search.reason or "report"
        c.stop_if(search.reason is not None or not math.isfinite(search.loss))
