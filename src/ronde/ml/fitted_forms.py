"""The form of each fitted attribute: what a file of an estimator may set, and what `ronde.ml.saving` checks.

The code that predicts relies on the shapes and dtypes that a fit sets, and native code gets the arrays as they are. So
an estimator declares them in `_fitted_forms`, in an order in which each form finds the sizes that it compares with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np

__all__ = ["INTS", "ArrayForm", "ClassesForm", "FittedForm", "KindForm", "NumberForm", "find_wrong_attribute"]

FLOATS = ("float32", "float64")
INTS = ("int32", "int64")
LARGEST_INT = (1 << 63) - 1

Sizes = dict[str, int]  # of axes, by name


class FittedForm(Protocol):
    """What an attribute has to be."""

    @property
    def is_needed(self) -> bool:
        """Whether each fitted estimator has the attribute."""

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        """Return what is wrong with a value, None: nothing. `sizes`: known from other attributes; it adds its own."""


def find_wrong_attribute(forms: Mapping[str, FittedForm], attributes: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the fitted attributes of an estimator, as a text; None: nothing.

    An estimator that has not been fitted has none.
    """
    if unknown := sorted(attributes.keys() - forms.keys()):
        return f"{unknown[0]!r} is not the name of a fitted attribute"
    sizes: Sizes = {}
    for name, form in forms.items():
        if name not in attributes:
            if attributes and form.is_needed:
                return f"{name} is missing"
        elif problem := form.problem(attributes[name], sizes):
            return f"{name} {problem}"
    return None


@dataclass(frozen=True)
class NumberForm:
    """An int from 0, or a float. `size`: the name of the axes that have this int, from 1, as length."""

    is_int: bool = True
    size: str | None = None
    is_needed: bool = False

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if isinstance(value, bool) or not isinstance(value, Integral if self.is_int else Real):
            return f"is {_described(value)}: expected {'a whole number' if self.is_int else 'a number'}"
        if not self.is_int:
            return None
        number: Any = value
        least = 0 if self.size is None else 1
        if not least <= number <= LARGEST_INT:
            return f"is a number out of range: expected one from {least}"
        if self.size is not None:
            sizes[self.size] = int(number)
        return None


@dataclass(frozen=True)
class ArrayForm:
    """An array with these axes. An axis has the length of those of the same name in other attributes, and is not empty.

    Attributes:
        axes: Their names.
        dtypes: Those that it may have; "str" stands for an array of texts.
        least_axes: How many of the axes, the last ones, it has at least. One that is left out has the length 1 if the
            name is new. With 0, a number will do.
    """

    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = FLOATS
    least_axes: int | None = None
    is_needed: bool = False

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        least = len(self.axes) if self.least_axes is None else self.least_axes
        if not isinstance(value, np.ndarray | np.generic) and (least or not isinstance(value, float)):
            return f"is {_described(value)}: expected an array"
        array = np.asarray(value)
        dtype = "str" if array.dtype.kind in "OU" else array.dtype.name
        if dtype not in self.dtypes:
            return f"is an array of {dtype}: expected {' or '.join(self.dtypes)}"
        if not least <= array.ndim <= len(self.axes):
            return f"has {array.ndim} dimensions: expected {least if array.ndim < least else len(self.axes)}"
        for axis in self.axes[: len(self.axes) - array.ndim]:
            sizes.setdefault(axis, 1)
        for axis, length in zip(self.axes[len(self.axes) - array.ndim :], array.shape):
            if length != sizes.setdefault(axis, length):
                return f"has the shape {array.shape}, with {length} {axis}: expected {sizes[axis]}"
            if not length:
                return f"has the shape {array.shape}: expected some {axis}"
        return None


@dataclass(frozen=True)
class KindForm:
    """An object of a class. `name`: of such an object, for errors."""

    kind: type
    name: str
    is_needed: bool = False

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        return None if isinstance(value, self.kind) else f"is {_described(value)}: expected {self.name}"


@dataclass(frozen=True)
class ClassesForm:
    """The classes. They say how many rows the coefficients have, the axis "planes": 1 for two classes.

    `least`: how many classes there are at least.
    """

    is_needed: bool = True
    least: int = 2

    def problem(self, value: Any, sizes: Sizes) -> str | None:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or len(value) < self.least:
            return f"is {_described(value)}: expected an array of at least {self.least} classes"
        sizes["planes"] = 1 if len(value) == 2 else len(value)
        return None


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"of type {type(value).__name__}"
