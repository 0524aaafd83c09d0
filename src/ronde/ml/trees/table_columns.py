"""The columns of a table that estimators of trees get: which are categories, and their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.trees.categories import categories_of, with_numbers

__all__ = ["categorical_mask", "with_category_numbers"]

Array = NDArray[Any]


def with_category_numbers(
    X: Any, named: Any, known: Mapping[str, Array] | None
) -> tuple[Any, dict[str, Array]]:
    """Return a data frame with numbers in place of categories, and these; anything else as it is, and none.

    `named`: the parameter `categorical_features`. `known`: the categories of an earlier fit that goes on; None: none.
    """
    if known is not None:
        categories = dict(known)
    elif named is None:
        categories = {}
    else:
        categories = categories_of(X, None if isinstance(named, str) else list(named))
    return with_numbers(X, categories), categories


def categorical_mask(named: Any, categories: Iterable[str], num_columns: int, names: Sequence[str]) -> Array:
    """Return which columns are categories, uint8.

    `named`: the parameter `categorical_features`; `categories`: names of those that a data frame has; `names`: of all
    columns, or none. Raises ValueError if `named` does not fit.
    """
    chosen = np.zeros(num_columns, np.uint8)
    chosen[[names.index(name) for name in categories]] = 1
    if named is None or isinstance(named, str):
        return chosen
    given = np.asarray(named)
    if given.dtype == bool:
        if given.shape != (num_columns,):
            raise ValueError(
                f"categorical_features is a mask of shape {given.shape}: expected ({num_columns},), the columns of X"
            )
        chosen[given] = 1
        return chosen
    for name in given.tolist():
        chosen[_number_of(name, num_columns, names)] = 1
    return chosen


def _number_of(name: Any, num_columns: int, names: Sequence[str]) -> int:
    if isinstance(name, str) and name in names:
        return names.index(name)
    if isinstance(name, Integral) and 0 <= int(name) < num_columns:
        return int(name)
    raise ValueError(
        f"categorical_features has {name!r}: expected a number below {num_columns}"
        f"{', or one of ' + ', '.join(names) if names else ''}"
    )
