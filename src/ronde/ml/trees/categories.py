"""Columns of categories in data frames: texts and other objects as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.fitted_forms import Sizes

__all__ = ["CategoriesForm", "categories_of", "with_numbers"]

Array = NDArray[Any]


@dataclass(frozen=True)
class CategoriesForm:
    """The form of `categories_` in a file: arrays of texts or numbers by the names of columns."""

    is_needed: bool = False

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return "is not a dict of columns by name"
        for name, array in value.items():
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "biufUO":
                return f"has no array of categories of the column {name!r}"
        return None


def categories_of(X: Any, named: Sequence[Any] | None) -> dict[str, Array]:
    """Return the categories of the columns of a data frame of pandas or Polars; no columns of anything else.

    `named`: the names or numbers of columns of categories, or a mask (None: those whose dtype is of categories). Of
    these, columns of numbers are left out. Raises ValueError if two categories have the same text.
    """
    frame = _as_pandas(X)
    if frame is None:
        return {}
    found = {}
    for number, name in enumerate(frame.columns):
        column, is_category = frame[name], frame[name].dtype.name == "category"
        is_text = column.dtype.kind not in "biuf" if hasattr(column.dtype, "kind") else True
        if is_category or (named is not None and is_text and _is_named(named, number, name)):
            values = column.cat.categories if is_category else column.dropna().unique()
            found[str(name)] = _plain(_sorted(values), str(name))
    return found


def _is_named(named: Sequence[Any], number: int, name: Any) -> bool:
    if len(named) and isinstance(named[0], bool | np.bool_):
        return bool(named[number]) if number < len(named) else False
    return any(each == name or (each == number and not isinstance(each, str)) for each in named)


def _sorted(values: Iterable[Any]) -> Array:
    """Return values in order; if some cannot be compared, as texts and numbers, in the order of their texts."""
    try:
        return np.asarray(sorted(values))
    except TypeError:
        return np.array(sorted(values, key=str), dtype=object)


def _plain(values: Array, name: str) -> Array:
    """Return categories as numbers or texts, which files can contain."""
    if values.dtype.kind in "biuf":
        return values
    texts = np.array(list(map(str, values)), dtype=object)
    if len(set(texts)) < len(texts):
        raise ValueError(f"two categories of the column {name!r} have the same text: rename one")
    return texts


def with_numbers(X: Any, categories: dict[str, Array]) -> Any:
    """Return a data frame with the numbers of categories, float64, in place of these; NaN for unknown ones.

    Anything else is returned as it is.
    """
    frame = _as_pandas(X) if categories else None
    if frame is None:
        return X
    columns = {}
    for name, known in categories.items():
        if name in frame.columns:
            numbers = {value: number for number, value in enumerate(known.tolist())}
            is_text = known.dtype.kind not in "biuf"
            values = frame[name].astype(object)
            columns[name] = np.array(
                [numbers.get(str(value) if is_text else value, np.nan) for value in values], np.float64
            )
    return frame.assign(**columns)


def _as_pandas(X: Any) -> Any:
    """Return a data frame of pandas, None if X is no data frame."""
    if hasattr(X, "iloc") and hasattr(X, "columns"):
        return X
    return X.to_pandas() if type(X).__module__.startswith("polars") and hasattr(X, "to_pandas") else None
