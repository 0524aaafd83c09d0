"""Classes as an optimizer's targets: their numbers, -1 and 1, and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.ml.class_weights import ClassWeights, class_factors
from ronde.ml.training_data import TrainingData

__all__ = ["ClassSigns", "each_class_against_rest", "with_class_numbers"]

Array = NDArray[Any]
Parts = dict[str, Any]


def with_class_numbers(data: TrainingData, class_weight: Any) -> tuple[TrainingData, Array]:
    """Return the data with numbers of classes as targets and weights by class, and the classes.

    Raises ValueError if there are fewer than two, or class_weight names others.
    """
    classes, sums = _at_least_two_classes(data)
    factors = None if class_weight is None else class_factors(class_weight, (classes, sums))
    data = data.mapped(_ClassNumbers(classes, factors))
    return replace(data, total_weight=float(sums.sum() if factors is None else factors @ sums)), classes


def each_class_against_rest(data: TrainingData, class_weight: Any) -> tuple[dict[int, TrainingData], Array]:
    """Return the data of each problem by the number of its class, and the classes.

    The targets are 1 for the rows of the class and -1 for the rest; of two classes only the second has a problem.
    Weights by class are as in scikit-learn's `LinearSVC`: with two classes each has its own; with more, a class has it
    only where it is the one against the rest.

    Raises ValueError as `with_class_numbers` does.
    """
    classes, sums = _at_least_two_classes(data)
    if len(classes) == 2:
        data, _ = with_class_numbers(data, class_weight)
        return {1: data.mapped(ClassSigns(1))}, classes
    factors = class_factors(class_weight, (classes, sums))
    data, _ = with_class_numbers(data, None)
    problems = {}
    for number, factor in enumerate(factors.tolist()):
        total_weight = float(sums.sum() + (factor - 1) * sums[number])
        problems[number] = replace(data.mapped(ClassSigns(number, factor)), total_weight=total_weight)
    return problems, classes


def _at_least_two_classes(data: TrainingData) -> ClassWeights:
    assert data.class_weights is not None
    classes, sums = data.class_weights
    if len(classes) < 2:
        raise ValueError(
            f"y has only one class, {classes.tolist()[0]!r}: a classifier needs samples of at least 2 classes"
        )
    return classes, sums


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
    """Replaces the number of a class by 1, and others by -1: `data.mapped(ClassSigns(1))`.

    `factor`: of the weights of the rows of the class.
    """

    number: int
    factor: float = 1.0

    def __call__(self, parts: Parts) -> Parts:
        belongs = parts["y"] == self.number
        signed = {**parts, "y": np.where(belongs, 1.0, -1.0)}
        if self.factor != 1:
            signed["sample_weight"] = np.where(belongs, self.factor, 1.0) * parts.get("sample_weight", 1.0)
        return signed
