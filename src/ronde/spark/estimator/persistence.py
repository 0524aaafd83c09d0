"""Saves and loads estimators and models: parameters as Spark ML does, Python objects as one pickle next to them.

The objects are in one row of a Parquet file, which Spark writes wherever it can write. Loading runs code in them, so
load only what you trust.
"""

from __future__ import annotations

import pickle
from typing import Any

import pyspark
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from ronde.data.needs import need
from ronde.spark.estimator.params import OBJECTS

__all__ = ["ObjectsReader", "ObjectsWriter", "metadata_session"]


class ObjectsWriter(MLWriter):  # type: ignore[misc]
    """Writes an estimator or a model. Attributes of the instance that `saved_attributes` names are saved, too."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        """Write into a new folder."""
        given = {param.name: value for param, value in self._instance._paramMap.items() if value is not None}
        plain = {name: value for name, value in given.items() if name not in OBJECTS}
        objects = {name: value for name, value in given.items() if name in OBJECTS}
        attributes = {name: getattr(self._instance, name) for name in self._instance.saved_attributes}
        DefaultParamsWriter.saveMetadata(
            self._instance, path, metadata_session(self), {"attributes": attributes}, plain
        )
        content = bytearray(need("cloudpickle", extra="spark-estimator").dumps(objects))
        frame = self.sparkSession.createDataFrame([(content,)], "objects binary")
        frame.coalesce(1).write.parquet(f"{path}/objects")


class ObjectsReader(MLReader):  # type: ignore[misc]
    """Reads what ObjectsWriter has written."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Return the instance."""
        metadata = DefaultParamsReader.loadMetadata(path, metadata_session(self))
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        row = self.sparkSession.read.parquet(f"{path}/objects").first()
        instance._set(**pickle.loads(bytes(row.objects)))
        for name, value in metadata["attributes"].items():
            setattr(instance, name, value)
        return instance


def metadata_session(io: Any) -> Any:
    """Return what this version of PySpark wants for metadata."""
    return io.sparkSession if int(pyspark.__version__.partition(".")[0]) >= 4 else io.sc
