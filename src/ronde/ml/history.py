"""What a fit recorded after each step, and a picture of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

__all__ = ["History"]


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
