"""The weights of classes: those in the data, and the factors of the parameter `class_weight`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClassWeights", "added_class_weights", "class_factors", "weights_by_class"]

Array = NDArray[Any]
ClassWeights = tuple[Array, Array]  # the classes, sorted, and the sum of the rows' weights of each


def weights_by_class(parts: Mapping[str, Any]) -> ClassWeights:
    """Return the classes in `y`, and the sum of `sample_weight`, or the number of rows, of each."""
    classes, numbers = np.unique(parts["y"], return_inverse=True)
    return classes, np.bincount(numbers.ravel(), parts.get("sample_weight"), len(classes)).astype(np.float64)


def added_class_weights(parts: Iterable[ClassWeights]) -> ClassWeights:
    """Return the classes of all parts, and the sums over the parts, formed in their order."""
    parts = list(parts)
    classes = np.unique(np.concatenate([each for each, _ in parts]))
    sums = np.zeros(len(classes))
    for each, weights in parts:
        sums[np.searchsorted(classes, each)] += weights
    return classes, sums


def class_factors(class_weight: Mapping[Any, float] | str | None, weights: ClassWeights) -> Array:
    """Return the factor of the weights of each class's rows.

    Raises ValueError if the parameter names a class that does not exist, and leaves one out that does.
    """
    classes, sums = weights
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str):  # "balanced"
        return np.asarray(sums.sum() / (len(classes) * np.where(sums > 0, sums, 1)))
    names = classes.tolist()
    unknown = [each for each in class_weight if each not in names]
    if unknown and not all(each in class_weight for each in names):
        raise ValueError(f"class_weight has {unknown}, and the classes are {names}: name classes that exist")
    return np.array([class_weight.get(each, 1.0) for each in names])
