"""`ronde.ml.spark`: the estimators of `ronde.ml` as estimators and models of Spark ML, for its pipelines.

The executors predict, in one pass over the rows.

Saved ones consist of Spark's metadata, which contain columns and `on`, and of one row of a Parquet file with the bytes
that `ronde.ml.saving` writes. Nothing is a pickle. Metadata name the classes with this module, so they stay here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.errors import UsageError
from ronde.launch.clusters.platforms import needs_package
from ronde.ml.base import DistributedEstimator
from ronde.ml.saving import from_bytes, to_bytes

with needs_package("pyspark", "spark-ml"):
    from pyspark import StorageLevel
    from pyspark.ml import Estimator, Model
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.param import Param
    from pyspark.ml.param.shared import (
        HasFeaturesCol,
        HasLabelCol,
        HasPredictionCol,
        HasProbabilityCol,
        HasRawPredictionCol,
        HasWeightCol,
    )
    from pyspark.ml.util import (
        DefaultParamsReader,
        DefaultParamsWriter,
        MLReadable,
        MLReader,
        MLWritable,
        MLWriter,
    )
    from pyspark.sql import Column, DataFrame
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from ronde.data.needs import need
from ronde.ml.row_predictions import OutputKind, as_matrix, output_kind, without_feature_names
from ronde.spark.columns import as_arrays
from ronde.spark.ml_params import check_names, metadata_session

__all__ = ["SparkEstimator", "SparkModel"]

Array = NDArray[Any]

COLUMNS = ("featuresCol", "labelCol", "weightCol", "predictionCol", "rawPredictionCol", "probabilityCol")
PLACE = "on"
ARRAY = "array<double>"
TYPES: Mapping[OutputKind, str] = {
    "cluster": "int",
    "integer": "double",  # as the labels of Spark ML are
    "number": "double",
    "text": "string",
    "numbers": ARRAY,
}
TEMPORARY = "ronde predictions"


class _Columns(HasFeaturesCol, HasPredictionCol, HasRawPredictionCol, HasProbabilityCol):
    """The columns that an estimator and its model read and add."""

    def setFeaturesCol(self, value: str) -> Any:  # noqa: N802 - Spark's name
        """Set the column of vectors or arrays; return this object.

        Args:
            value: The name of the column.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str) -> Any:  # noqa: N802
        """Set the column that gets the predictions; return this object.

        Args:
            value: The name of the column.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(predictionCol=value)

    def setRawPredictionCol(self, value: str) -> Any:  # noqa: N802
        """Set the column that gets the scores of classes; return this object.

        Args:
            value: The name of the column; "" for none.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self, value: str) -> Any:  # noqa: N802
        """Set the column that gets the probabilities of classes; return this object.

        Args:
            value: The name of the column; "" for none.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(probabilityCol=value)

    def setParams(self, **params: Any) -> Any:  # noqa: N802
        """Set several parameters; return this object.

        Args:
            params: Parameters by name: `setParams(featuresCol="x", predictionCol="y")`.

        Raises:
            UsageError: A name is not a parameter.
            TypeError: The name of a column is not a text.
        """
        check_names(self, params)
        return self._set(**params)


class SparkModel(Model, _Columns, MLReadable, MLWritable):
    """A fitted estimator of `ronde.ml` that adds columns with its predictions to a Spark data frame.

        model = SparkModel(ronde.ml.load("model.ronde"), featuresCol="features")
        predicted = model.transform(frame)

    The executors predict. Numbers of clusters are integers; predicted numbers and classes are doubles, or texts if the
    classes are texts. For a classifier, `transform` also adds a vector with the scores of the classes (for two classes
    the negative score and the score), and one with their probabilities if it has `predict_proba`.

    Args:
        estimator: The fitted estimator.
        params: The parameters `featuresCol` ("features"), `predictionCol` ("prediction"), `rawPredictionCol`
            ("rawPrediction") and `probabilityCol` ("probability"). The latter two may be "", for no column.

    Attributes:
        estimator: The fitted estimator.

    Raises:
        UsageError: The estimator is not one of `ronde.ml`, or a name is no parameter.
        NotFittedError: The estimator is not fitted.
    """

    def __init__(self, estimator: DistributedEstimator, **params: str) -> None:
        super().__init__()
        _check_kind(self, estimator)
        check_is_fitted(estimator)
        self.estimator = estimator
        self.setParams(**params)

    def write(self) -> _Writer:
        """Return what writes this model: `model.write().overwrite().save(path)`. Raises nothing."""
        return _Writer(self, self.estimator)

    @classmethod
    def read(cls) -> _Reader:
        """Return what reads a model: `SparkModel.read().load(path)`. Raises nothing."""
        return _Reader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        columns = {
            "predict": self.getPredictionCol(),
            "decision_function": self.getRawPredictionCol(),
            "predict_proba": self.getProbabilityCol(),
        }
        return _with_predictions(dataset, self.estimator, self.getFeaturesCol(), columns)


class SparkEstimator(Estimator, _Columns, HasLabelCol, HasWeightCol, MLReadable, MLWritable):
    """An estimator of `ronde.ml` for pipelines of Spark ML; `fit` returns a SparkModel.

        estimator = SparkEstimator(LogisticRegression(max_iter=200), featuresCol="features", labelCol="clicked")
        predicted = estimator.fit(train).transform(test)

    The tasks of a fit run where the rows of the data frame are. There are as many tasks as the executors have slots,
    unless the parameter `on` of the estimator says otherwise: `LogisticRegression(on="spark:4")`. During a fit, Spark
    caches the data frame.

    All parameters of the estimator are parameters of this object, too, under their names: `estimator.max_iter` is a
    `Param` for `ParamGridBuilder`, and `estimator.setParams(max_iter=50)` sets it.

    Args:
        estimator: The estimator; if it is fitted, that has no effect.
        params: The parameters `featuresCol` ("features"), the name of a column of vectors or arrays; `labelCol`
            ("label") and `weightCol` (none), columns of numbers; and those of SparkModel.

    Raises:
        UsageError: The estimator is not one of `ronde.ml`, or a name is no parameter.
    """

    def __init__(self, estimator: DistributedEstimator, **params: Any) -> None:
        super().__init__()
        _check_kind(self, estimator)
        self._kind = type(estimator)
        own = estimator.get_params(deep=False)
        for name in own:
            setattr(self, name, Param(self, name, f"{name} of {self._kind.__name__}"))
        self._params = None  # a list of all parameters, which the constructors above have made
        self._setDefault(**own)
        self.setParams(**params)

    def setLabelCol(self, value: str) -> Any:  # noqa: N802 - Spark's name
        """Set the column of labels; return this object.

        Args:
            value: The name of the column.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Any:  # noqa: N802
        """Set the column with the weights of the rows; return this object.

        Args:
            value: The name of a column of numbers.

        Raises:
            TypeError: It is not a text.
        """
        return self._set(weightCol=value)

    def write(self) -> _Writer:
        """Return what writes this estimator: `estimator.write().overwrite().save(path)`. Raises nothing."""
        return _Writer(self, self._estimator())

    @classmethod
    def read(cls) -> _Reader:
        """Return what reads an estimator: `SparkEstimator.read().load(path)`. Raises nothing."""
        return _Reader(cls)

    def _estimator(self) -> DistributedEstimator:
        """Return a new estimator with the present parameters."""
        return self._kind(**{name: self.getOrDefault(name) for name in self._kind._get_param_names()})

    def _fit(self, dataset: DataFrame) -> SparkModel:
        estimator: Any = self._estimator()
        if estimator.on is None:
            estimator.on = "spark"
        named = {}
        if get_tags(estimator).target_tags.required:
            named["y"] = self.getLabelCol()
        if self.isDefined("weightCol") and self.getWeightCol():
            named["sample_weight"] = self.getWeightCol()
        names = [self.getFeaturesCol(), *named.values()]
        if missing := [name for name in names if name not in dataset.columns]:
            raise UsageError(f"the data frame lacks the columns {missing}: it has {dataset.columns}")
        rows = dataset.select(*(f"`{name}`" for name in names))
        is_kept = dataset.storageLevel.useMemory or dataset.storageLevel.useDisk
        if not is_kept:
            rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            estimator.fit(rows, **named)
        finally:
            if not is_kept:
                rows.unpersist()
        model: SparkModel = self._copyValues(SparkModel(estimator))
        return model


def _check_kind(wrapper: Any, estimator: Any) -> None:
    if not isinstance(estimator, DistributedEstimator):
        raise UsageError(
            f"{type(wrapper).__name__} got a {type(estimator).__name__}: expected an estimator of ronde.ml, such as "
            "KMeans(8)"
        )


class _Writer(MLWriter):
    """Writes an instance of one of the classes above. `estimator`: what it wraps."""

    def __init__(self, instance: Any, estimator: DistributedEstimator) -> None:
        super().__init__()
        self._instance, self._estimator = instance, estimator

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        """Write into a new folder."""
        content = bytearray(to_bytes(self._estimator))
        plain = self._instance.copy()  # with what JSON can hold; the estimator has the rest
        plain._paramMap = {
            param: value for param, value in plain._paramMap.items() if _is_plain(param, value)
        }
        plain._defaultParamMap = {
            param: value for param, value in plain._defaultParamMap.items() if _is_plain(param, value)
        }
        DefaultParamsWriter.saveMetadata(plain, path, metadata_session(self))
        frame = self.sparkSession.createDataFrame([(content,)], "estimator binary")
        frame.coalesce(1).write.parquet(f"{path}/estimator")


def _is_plain(param: Any, value: Any) -> bool:
    return param.name in COLUMNS or (param.name == PLACE and isinstance(value, str))


class _Reader(MLReader):
    """Reads what `_Writer` has written. `kind`: one of the classes above."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the instance. Raises UsageError if the files are damaged."""
        metadata = DefaultParamsReader.loadMetadata(path, metadata_session(self))
        row = self.sparkSession.read.parquet(f"{path}/estimator").first()
        if row is None:
            raise UsageError(f"{path}/estimator has no rows: save the pipeline or its stage again")
        instance = self._kind(from_bytes(bytes(row.estimator), path))
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance


@dataclass(frozen=True)
class _Output:
    """A column that is added: its name, the method of the estimator, and its type in Spark."""

    column: str
    method: str
    type: str


def _with_predictions(
    frame: DataFrame, estimator: Any, features: str, columns: Mapping[str, str]
) -> DataFrame:
    """Return the data frame with further columns.

    `features`: a column of numbers, arrays or vectors; `columns`: names by method of the estimator, "" for none. A
    method that the estimator lacks adds no column.

    Raises UsageError if `features` is missing, or one of the others is there already.
    """
    estimator = without_feature_names(estimator)
    outputs = [
        _Output(column, method, _type_of(estimator, method))
        for method, column in columns.items()
        if column and hasattr(estimator, method)
    ]
    if existing := [each.column for each in outputs if each.column in frame.columns]:
        raise UsageError(
            f"the data frame has the columns {existing} already: drop them, or give the predictions other names, as by "
            "setPredictionCol"
        )
    rows = as_arrays(frame, [features], "float64")[features]
    found = _function(to_bytes(estimator), features, outputs)(rows)
    names = [F.col(f"`{name}`") for name in frame.columns]
    added = [
        _as_column(F.col(f"`{TEMPORARY}`").getField(f"output_{number}"), each).alias(each.column)
        for number, each in enumerate(outputs)
    ]
    return frame.withColumn(TEMPORARY, found).select(*names, *added)


def _as_column(value: Column, output: _Output) -> Column:
    return array_to_vector(value) if output.type == ARRAY else value


def _type_of(estimator: Any, method: str) -> str:
    """Return the type of a method's result for one row."""
    return TYPES[output_kind(estimator, partial(_result, estimator, method))]


def _result(estimator: Any, method: str, X: Array) -> Array:
    """Return what the method returns; scores of two classes as two columns."""
    values: Array = np.asarray(getattr(estimator, method)(X))
    if method == "decision_function" and values.ndim == 1:
        return np.stack([-values, values], axis=1)
    return values


def _function(content: bytes, features: str, outputs: list[_Output]) -> Callable[..., Column]:
    """Return a pandas UDF from features to a struct of the outputs."""
    pandas = need("pandas", extra="spark-ml")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas

        estimator = from_bytes(content, "the model")
        for batch in batches:
            X = as_matrix({features: batch}, estimator.n_features_in_, "frame.dropna()")
            yield pandas.DataFrame(
                {
                    f"output_{number}": _series(estimator, each, X, len(batch))
                    for number, each in enumerate(outputs)
                }
            )

    # Spark reads the types when it makes the function; as text it could not find pandas.
    iterator: Any = Iterator
    run.__annotations__ = {"batches": iterator[pandas.Series], "return": iterator[pandas.DataFrame]}
    fields = ", ".join(f"output_{number} {each.type}" for number, each in enumerate(outputs))
    made: Callable[..., Column] = F.pandas_udf(run, fields)
    return made


def _series(estimator: Any, output: _Output, X: Array, rows: int) -> Any:
    if not rows:
        return []
    values = _result(estimator, output.method, X)
    return list(values.astype(np.float64)) if output.type == ARRAY else values
