"""What a user sees of a fit while it runs: a line for each step, and the calls of scikit-learn's callbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Called after each step, on task 0: `c.stop_if(has_converged or progress(record))`.

    Where the tasks are threads of this process, it calls the callbacks of the estimator. A copy in another process
    prints the lines, and calls none.

    Args:
        name: What is fitted, for the lines.
        verbose: Whether to print lines, to standard error.
        context: The callback context of the fit; None: there are no callbacks.
        estimator: Whose fit it is, for callbacks.
        data: X, y and metadata by name, for callbacks that ask for them.
    """

    def __init__(
        self,
        name: str,
        verbose: bool,
        context: Any = None,
        estimator: Any = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._name, self._verbose = name, verbose
        self._context, self._estimator, self._data = context, estimator, data or {}

    def __deepcopy__(self, memo: object) -> Progress:
        return self  # tasks that are threads get copies of a step function, but report to the one estimator

    def __reduce__(self) -> tuple[Any, ...]:
        return Progress, (self._name, self._verbose)

    def __call__(
        self, record: Mapping[str, Any], attributes: Callable[[], Mapping[str, Any]] | None = None
    ) -> bool:
        """Report one step; return whether a callback asks for the end of the fit.

        Args:
            record: Of the history: `step`, `loss` and others.
            attributes: Returns what the estimator would have as attributes if the fit ended here.

        Raises:
            Exception: A callback failed.
        """
        if self._verbose:
            values = ", ".join(f"{name} {float(value):.6g}" for name, value in record.items())
            print(f"{self._name}: {values}", file=sys.stderr, flush=True)
        if self._context is None:
            return False
        step = self._context.subcontext(task_name="step")
        step.call_on_fit_task_begin(estimator=self._estimator, **self._data)
        should_stop = step.call_on_fit_task_end(
            estimator=self._estimator, reconstruction_attributes=attributes, **self._data
        )
        return bool(should_stop)

    def end(self) -> None:
        """Tell the callbacks that the estimator is fitted. Raises whatever a callback raises."""
        if self._context is not None:
            self._context.call_on_fit_task_end(
                estimator=self._estimator, reconstruction_attributes={}, **self._data
            )
