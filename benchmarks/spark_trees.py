"""Gradient boosting and random forests of Spark ML, with the methods of scikit-learn's estimators."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["SparkTrees"]

Array = NDArray[Any]


class SparkTrees:
    """A classifier of two classes by trees of Spark ML, in a JVM of this process.

    Args:
        is_boosting: Or a random forest.
        trees: Their number.
        depth: Of a tree, at most.
        threads: Of Spark.
    """

    def __init__(self, is_boosting: bool, trees: int, depth: int, threads: int) -> None:
        from pyspark.ml.classification import GBTClassifier, RandomForestClassifier
        from pyspark.sql import SparkSession

        self._session = (
            SparkSession.builder.master(f"local[{threads}]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "3g")
            .getOrCreate()
        )
        self._session.sparkContext.setLogLevel("ERROR")
        self._threads, self._files = threads, 0
        self._folder = tempfile.TemporaryDirectory()  # removed with this object
        if is_boosting:
            self._trees = GBTClassifier(maxIter=trees, maxDepth=depth, maxBins=255, stepSize=0.1, seed=0)
        else:
            self._trees = RandomForestClassifier(numTrees=trees, maxDepth=depth, maxBins=255, seed=0)
        self._rows: Any = None
        self._fitted: Any = None

    def load(self, data: Array, y: Array) -> None:
        """Read rows into the memory of Spark."""
        self._rows = self._frame(data, y).cache()
        self._rows.count()

    def fit(self, data: Array, y: Array) -> Self:
        """Fit to the rows that `load` has read, or to these."""
        if self._rows is None:
            self.load(data, y)
        self._fitted = self._trees.fit(self._rows)
        return self

    def predict_proba(self, data: Array) -> Array:
        """Return the probabilities of the classes, shape (rows, 2)."""
        found = self._fitted.transform(self._frame(data, np.zeros(len(data)))).select("number", "probability")
        rows = sorted((row.number, row.probability.toArray()) for row in found.collect())
        return np.array([probabilities for _, probabilities in rows])

    def _frame(self, data: Array, y: Array) -> Any:
        """Return a data frame with the columns features, label and number, which a Parquet file has."""
        import pyarrow as pa
        from pyarrow import parquet
        from pyspark.ml.feature import VectorAssembler

        names = [f"x{number}" for number in range(data.shape[1])]
        self._files += 1
        path = Path(self._folder.name, f"{self._files}.parquet")
        table = pa.table([*data.T, y.astype(float), np.arange(len(data))], names=[*names, "label", "number"])
        parquet.write_table(table, path, row_group_size=-(-len(data) // self._threads))
        frame = self._session.read.parquet(str(path)).repartition(self._threads)
        assembler = VectorAssembler(inputCols=names, outputCol="features")
        return assembler.transform(frame).select("features", "label", "number")
