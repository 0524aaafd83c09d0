"""`ronde.ml.flink`: predictions of the estimators of `ronde.ml` for the rows of a Flink table.

They are pandas functions of Flink, so the TaskManagers predict. A model travels as the bytes of a saved one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ronde.errors import UsageError
from ronde.launch.clusters.platforms import needs_package
from ronde.ml.base import DistributedEstimator
from ronde.ml.saving import from_bytes, to_bytes

with needs_package("pyflink", "flink"):
    from pyflink.table import DataTypes, Table
    from pyflink.table.expressions import col
    from pyflink.table.udf import FunctionContext, ScalarFunction, udf

from sklearn.utils.validation import check_is_fitted

from ronde.flink.table_rows import check_columns, column_names, numeric_columns
from ronde.ml.row_predictions import OutputKind, as_matrix, output_kind, without_feature_names

__all__ = ["with_predictions"]

PREDICTION = {"prediction": "predict"}


def with_predictions(
    table: Table,
    model: DistributedEstimator,
    features: Sequence[str] | None = None,
    outputs: Mapping[str, str] = PREDICTION,
) -> Table:
    """Return the Flink table with further columns: what a fitted estimator predicts for each row.

        predicted = with_predictions(table, model, ["age", "hour"], {"class": "predict", "scores": "predict_proba"})
        predicted.execute_insert("clicks_with_classes")

    The TaskManagers predict when Flink executes the table, batch by batch, so the table may also be unbounded. They
    need `pip install 'ronde[flink,ml]'`.

    Args:
        table: The table, in an environment for streams or batches.
        model: A fitted estimator, for example one from `ronde.ml.load`.
        features: The names of the columns with the features, in the order of the fit: numbers, or arrays of numbers
            (None: all columns of the table).
        outputs: The method of the estimator for each new column, by the name of that column (`{"prediction":
            "predict"}`). The numbers of clusters become INT, integer classes BIGINT, other numbers DOUBLE, texts
            STRING, and several numbers for a row ARRAY<DOUBLE>.

    Raises:
        UsageError: The model is not an estimator of `ronde.ml` or lacks a method; a column is missing, holds no
            numbers, or exists already; or the features are not as many as those of the fit. If array columns decide
            that, or a value is missing, the Flink job fails instead, with the same text.
        NotFittedError: The model is not fitted.
    """
    if not isinstance(model, DistributedEstimator):
        raise UsageError(
            f"the model is a {type(model).__name__}: expected an estimator of ronde.ml, such as KMeans(8)"
        )
    check_is_fitted(model)
    names = _features(table, model, features)
    if existing := [name for name in outputs if name in column_names(table)]:
        raise UsageError(
            f"the table has the columns {existing} already: drop them, or give the predictions other names, as by "
            'outputs={"class": "predict"}'
        )
    if missing := [method for method in outputs.values() if not hasattr(model, method)]:
        raise UsageError(f"{type(model).__name__} has no {' and no '.join(missing)}")
    model = without_feature_names(model)
    content = to_bytes(model)
    added = []
    for name, method in outputs.items():
        kind = output_kind(model, getattr(model, method))
        predict = udf(_Predict(content, method, names, kind), result_type=_types()[kind], func_type="pandas")
        added.append(predict(*map(col, names)).alias(name))
    return table.add_columns(*added)


def _features(table: Table, model: Any, features: Sequence[str] | None) -> list[str]:
    """Return the names of the columns with the features. Raises UsageError if they cannot be those of the fit."""
    there = column_names(table)
    names = there if features is None else list(features)
    if missing := [name for name in names if name not in there]:
        raise UsageError(f"the table lacks the columns {missing}: it has {there}")
    if set(names) <= set(numeric_columns(table)) and len(names) != model.n_features_in_:
        raise UsageError(
            f"the columns {names} are {len(names)} features, but {type(model).__name__} is expecting "
            f"{model.n_features_in_}: name them, as by features=[...]"
        )
    check_columns(table, names)
    return names


def _types() -> dict[OutputKind, Any]:
    return {
        "cluster": DataTypes.INT(),
        "integer": DataTypes.BIGINT(),
        "number": DataTypes.DOUBLE(),
        "text": DataTypes.STRING(),
        "numbers": DataTypes.ARRAY(DataTypes.DOUBLE()),
    }


class _Predict(ScalarFunction):
    """Predicts for a batch of rows. `content`: the saved model; `method`: its method; `kind`: what that gives."""

    def __init__(self, content: bytes, method: str, names: Sequence[str], kind: OutputKind) -> None:
        self._content, self._method, self._names, self._kind = content, method, names, kind

    def open(self, function_context: FunctionContext) -> None:
        """Load the model, once for each subtask."""
        self._model = from_bytes(self._content, "the model")

    def eval(self, *columns: Any) -> Any:
        """Return a series of the length of the columns."""
        import pandas

        named = dict(zip(self._names, columns))
        X = as_matrix(named, self._model.n_features_in_, "a filter with is_not_null")
        values = getattr(self._model, self._method)(X)
        if self._kind == "numbers":
            return pandas.Series(list(values.astype("float64")), dtype=object)
        return pandas.Series(values.astype("int64") if self._kind == "integer" else values)
