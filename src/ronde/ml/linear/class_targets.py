"""Classes as an optimizer's targets: their numbers, -1 and 1, and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.light_dataclasses import dataclass, replace
from ronde.ml.class_weights import class_factors
from ronde.ml.training_data import TrainingData

__all__ = ["ClassSigns", "with_class_numbers"]

Array = NDArray[Any]
Parts = dict[str, Any]


def with_class_numbers(data: TrainingData, class_weight: Any) -> tuple[TrainingData, Array]:
    """Return the data with numbers of classes as targets and weights by class, and the classes.

    Raises ValueError if there are fewer than two, or class_weight names others.
    """
    assert data.class_weights is not None
    classes, sums = data.class_weights
    if len(classes) < 2:
        raise ValueError(
            f"y has only one class, {classes.tolist()[0]!r}: a classifier needs samples of at least 2 classes"
        )
    factors = None if class_weight is None else class_factors(class_weight, data.class_weights)
    data = data.mapped(_ClassNumbers(classes, factors))
    return replace(data, total_weight=float(sums.sum() if factors is None else factors @ sums)), classes


@dataclass(frozen=True)
class _ClassNumbers:
    """Replaces classes by their numbers, and weights each with its factor, if there are any."""

    classes: Array
    factors: Array | None

    def __call__(self, parts: Parts) -> Parts:
        numbers = np.searchsorted(self.classes, parts["y"])
        numbered = {**parts, "y": numbers.astype(np.float64)}
        if self.factors is not None:
            numbered["sample_weight"] = self.factors[numbers] * parts.get("sample_weight", 1.0)
        return numbered


@dataclass(frozen=True)
class ClassSigns:
    """Replaces the number of a class by 1, and others by -1: `data.mapped(ClassSigns(1))`."""

    number: int

    def __call__(self, parts: Parts) -> Parts:
        return {**parts, "y": np.where(parts["y"] == self.number, 1.0, -1.0)}
