"""What all estimators of trees have in common: the columns of a table, categories, rows to predict, seeds, tasks."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import validate_data

from ronde.ml.base import DistributedEstimator
from ronde.ml.fitted_forms import FittedForm, NumberForm
from ronde.ml.tasks import place_of
from ronde.ml.training_data import FLOATS, TrainingData, least_rows_of_block, training_data
from ronde.ml.trees.bins import BinsForm, check_categories
from ronde.ml.trees.categories import CategoriesForm, categories_of, with_numbers

__all__ = ["READ_IN_PARTS", "TreeEstimator"]

Array = NDArray[Any]

READ_IN_PARTS = "read some at a time, as by ronde.comqueue.read(path, columns).load(0, 1000)"


class TreeEstimator(DistributedEstimator):
    """An estimator whose model consists of trees of binned rows.

    Attributes:
        trees_: The nodes of all trees, a dict of arrays.
        bins_: The bins of all columns, a dict of arrays.
        categories_: The categories of columns of data frames by name; absent if there are none.
        seed_: Of random numbers; of warm starts that of the first fit.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **DistributedEstimator._parameter_constraints,
        "max_leaf_nodes": [Interval(Integral, 2, None, closed="left"), None],
        "max_depth": [Interval(Integral, 1, None, closed="left"), None],
        "max_bins": [Interval(Integral, 2, 255, closed="both")],
        "categorical_features": ["array-like", StrOptions({"from_dtype"}), None],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **DistributedEstimator._fitted_forms,
        "bins_": BinsForm(),
        "categories_": CategoriesForm(),
        "seed_": NumberForm(),
    }

    categorical_features: Any
    warm_start: bool
    random_state: Any
    max_bins: int
    trees_: dict[str, Array]
    bins_: dict[str, Array]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    @property
    def _is_warm(self) -> bool:
        return bool(self.warm_start) and hasattr(self, "trees_")

    def _place(self, data: TrainingData) -> Any:
        """Return where the tasks run: by default one task, whose native code takes all cores that pay."""
        place = place_of(self.on, data.num_rows * data.num_features)
        return "threads:1" if self.on is None and isinstance(place, str) else place

    def _rows_per_block(self, data: TrainingData) -> int:
        """Return how many rows a row block has at least: of sparse rows as many as of the same rows in an array."""
        return least_rows_of_block(data.num_rows, data.num_rows * data.num_features)

    def _seed(self) -> int:
        """Return the seed of a fit: of a warm start that of the first one, so that the same rows are drawn."""
        if self._is_warm and hasattr(self, "seed_"):
            return int(self.seed_)
        if self.random_state is None:
            return 0
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _encoded(self, X: Any) -> tuple[Any, dict[str, Array]]:
        """Return a data frame with numbers in place of categories, and these; anything else as it is, and none.

        A warm start has the categories of the earlier fit; others count as missing values.
        """
        if self._is_warm:
            categories = dict(getattr(self, "categories_", {}))
        elif self.categorical_features is None:
            categories = {}
        else:
            named = None if isinstance(self.categorical_features, str) else list(self.categorical_features)
            categories = categories_of(X, named)
        return with_numbers(X, categories), categories

    def _data(
        self, X: Any, y: Any, sample_weight: Any, **options: Any
    ) -> tuple[TrainingData, dict[str, Array]]:
        """Return the arguments of `fit` as data, and the categories of a data frame. `options`: of `training_data`.

        Raises ValueError.
        """
        shape: Any = getattr(y, "shape", ())
        if len(shape) == 2 and shape[1] > 1:
            name = type(self).__name__
            each = "MultiOutputClassifier" if is_classifier(self) else "MultiOutputRegressor"
            raise ValueError(
                f"y should be a 1d array, got an array of shape {shape} instead: {name} has one output, so fit a model "
                f"for each, by sklearn.multioutput.{each}({name}())"
            )
        encoded, categories = self._encoded(X)
        data = training_data(
            self, encoded, y, sample_weight, ensure_all_finite=False, accept_sparse="csr", **options
        )
        return data, categories

    def _is_categorical(self, data: TrainingData, categories: Mapping[str, Array]) -> Array:
        """Return which columns are categories, uint8. `categories`: those of a data frame by name.

        Raises ValueError if `categorical_features` does not fit, or a column has too many categories.
        """
        chosen = np.zeros(data.num_features, np.uint8)
        chosen[self._numbers_of(list(categories), "categorical_features")] = 1
        if self.categorical_features is not None and not isinstance(self.categorical_features, str):
            self._choose_given(chosen)
        if isinstance(data.rows, Mapping):
            names = list(getattr(self, "feature_names_in_", ()))
            check_categories(data.rows["X"], self.max_bins, chosen, names)
        return chosen

    def _choose_given(self, chosen: Array) -> None:
        """Set the columns that `categorical_features` names."""
        given = np.asarray(self.categorical_features)
        if given.size and given.dtype.kind not in "biuUO":
            raise ValueError(
                "categorical_features must be an array-like of bool, int or str, got: "
                f"{', '.join(sorted({type(each).__name__ for each in given.tolist()}))}."
            )
        if given.dtype == bool:
            if given.shape != chosen.shape:
                raise ValueError(
                    "categorical_features set as a boolean mask must have shape (n_features,), which is "
                    f"({len(chosen)},), got: {given.shape}"
                )
            chosen[given] = 1
        elif given.size:
            chosen[self._numbers_of(given.tolist(), "categorical_features")] = 1

    def _numbers_of(self, names: list[Any], parameter: str) -> list[int]:
        """Return the numbers of columns that are given by number or name. Raises ValueError."""
        known, known_count = list(getattr(self, "feature_names_in_", ())), self.n_features_in_
        numbers = []
        for name in names:
            if isinstance(name, str) and name in known:
                numbers.append(known.index(name))
            elif isinstance(name, Integral) and not isinstance(name, bool) and 0 <= int(name) < known_count:
                numbers.append(int(name))
            else:
                raise ValueError(
                    f"{parameter} set as integer indices must be in [0, n_features - 1], or be names of columns, and "
                    f"it has {name!r}: expected a number below {self.n_features_in_}"
                    f"{', or one of ' + ', '.join(known) if known else ''}"
                )
        return numbers

    def _checked_rows(self, X: Any, categories: dict[str, Array] | None = None) -> Any:
        """Return rows with the columns of the fit, as numbers. `categories`: None: those of the fit.

        Raises ValueError if X has other columns.
        """
        known = getattr(self, "categories_", {}) if categories is None else categories
        X = with_numbers(X, known)
        return validate_data(
            self, X, dtype=FLOATS, order="C", ensure_all_finite=False, accept_sparse="csr", reset=False
        )
