"""Where the tasks of a fit run, and how many threads of BLAS each of them has."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ronde.comm.world import has_joined
from ronde.comqueue import IterationStep, iterate
from ronde.comqueue.functions import name_of

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

    from ronde.launch.clusters.cluster import Cluster
    from ronde.ml.training_data import TrainingData

__all__ = ["SingleThreadedStep", "can_lose_a_task", "iterate_fit", "one_blas_thread", "place_of"]

WORK_OF_A_TASK = 1 << 18  # numbers: with fewer, starting another thread costs more than it saves


def place_of(on: str | Cluster | None, size: int) -> str | Cluster | None:
    """Return the `on` of `iterate` for the `on` of an estimator. `size`: how many numbers a step reads.

    None stands for the ranks of this job, or for threads of this process: as many as it has cores, fewer for a fit that
    is so short that they do not pay. Raises nothing.
    """
    if on is not None or has_joined():
        return on
    return f"threads:{max(1, min(len(os.sched_getaffinity(0)), size // WORK_OF_A_TASK))}"


def can_lose_a_task(place: str | Cluster | None) -> bool:
    """Return whether a task may be lost while this process goes on, so that checkpoints in memory have a use.

    Threads of this process, and the ranks of this job (None), end together. `place`: as of `place_of`.
    """
    return place is not None and not (isinstance(place, str) and place.startswith("threads"))


class _Limit:
    """A limit of BLAS to one thread that begins with the first of several overlapping uses and ends with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = 0
        self._stack = ExitStack()

    @functools.cached_property
    def _controller(self) -> ThreadpoolController | None:
        try:
            from threadpoolctl import ThreadpoolController
        except ModuleNotFoundError:  # comes with scikit-learn, which the optimizers do not need
            return None
        return ThreadpoolController()  # looks through all loaded libraries: 1 ms or more

    def acquire(self) -> None:
        with self._lock:
            if self._uses == 0 and self._controller is not None:
                self._stack.enter_context(self._controller.limit(limits=1))
            self._uses += 1

    def release(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses == 0:
                self._take_control()
                self._stack.close()

    def _take_control(self) -> None:
        """Let this thread end what another may have begun: OpenBLAS obeys only the thread that set the limit."""
        for library in self._controller.lib_controllers if self._controller is not None else ():
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread(force=True)


_limit = _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS and OpenMP use one thread in this process, so that products have the same bits for any number of cores.

    Fits in several threads may overlap. Raises nothing.
    """
    _limit.acquire()
    try:
        yield
    finally:
        _limit.release()


class SingleThreadedStep:
    """A step that uses one thread of BLAS, wherever its task is: `iterate(SingleThreadedStep(step), ...)`.

    Args:
        step: The function.
        is_stateless: Whether tasks may share it.
    """

    def __init__(self, step: Callable[[Any], Any], is_stateless: bool = False) -> None:
        self._step, self._is_stateless = step, is_stateless
        self.__qualname__ = name_of(step)

    def __deepcopy__(self, memo: dict[int, Any]) -> SingleThreadedStep:
        step = self._step if self._is_stateless else copy.deepcopy(self._step, memo)
        return SingleThreadedStep(step, self._is_stateless)

    def __call__(self, c: Any) -> None:
        with one_blas_thread():
            self._step(c)


def iterate_fit(
    step: Callable[[IterationStep], None],
    data: TrainingData,
    state: Mapping[str, Any],
    max_iter: int,
    on: str | Cluster | None,
) -> SimpleNamespace:
    """Return the state after the last step of an iteration over the rows of a fit.

    `step`: keeps nothing beside the state, so that tasks that are threads share it. `on`: of the estimator. Raises
    RondeError as `iterate` does.
    """
    place = place_of(on, data.work)
    return iterate(
        SingleThreadedStep(step, is_stateless=True),
        data=data.rows_at(place),
        state=state,
        max_iter=max_iter,
        on=place,
        rows_per_block=data.rows_per_block,
    ).state
