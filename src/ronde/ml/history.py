"""What a fit tells after each step: a `History` of records, and lines and calls of callbacks while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

__all__ = ["History", "Progress"]


class History(Sequence[dict[str, float]]):
    """One record for each step of a fit: `history[-1]["loss"]`. An estimator has it as `history_`.

    Each record has `step`, from 1, and `loss`; an estimator documents what else.

    Args:
        records: The records, by step.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._records = [{name: _plain(value) for name, value in record.items()} for record in records]

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> dict[str, float]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, float]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, float] | list[dict[str, float]]:
        return self._records[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        last = ", ".join(f"{name} {value:.6g}" for name, value in self._records[-1].items()) if self else ""
        return f"<History: {len(self)} steps{last and '; the last: ' + last}>"

    def plot(self, name: str = "loss", ax: Any = None) -> Any:
        """Draw a value over the steps; return Matplotlib's axes.

        Args:
            name: The name of the value in the records (`"loss"`).
            ax: The axes to draw on (None: new ones).

        Raises:
            ModuleNotFoundError: Matplotlib is not installed.
            KeyError: The records have no value of that name.
        """
        values = [record[name] for record in self._records]
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        ax.plot([record["step"] for record in self._records], values)
        ax.set_xlabel("step")
        ax.set_ylabel(name)
        return ax


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as Python's number."""
    return value.item() if hasattr(value, "item") else value


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
