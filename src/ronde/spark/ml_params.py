"""Parameters of TorchEstimator and its model as Spark ML has them (`setBatchSize(64)`), and their files.

A saved estimator or model has its parameters where Spark ML writes them, and its Python objects in one row of a Parquet
file, which Spark writes wherever it can write. Loading runs code in these objects, so load only what you trust.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import pyspark
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from ronde.data.needs import need
from ronde.errors import UsageError

__all__ = [
    "EstimatorParams",
    "ModelParams",
    "ObjectsReader",
    "ObjectsWriter",
    "check_names",
    "metadata_session",
]

# Parameters that JSON cannot hold.
OBJECTS = (
    "model",
    "optimizer",
    "loss",
    "metrics",
    "callbacks",
    "store",
    "backend",
    "gradient_compression",
)

C = TypeVar("C")


def _param(name: str, doc: str, convert: Any = None) -> Any:
    return Param(Params._dummy(), name, doc, convert or TypeConverters.identity)


def _accessors(cls: type[C]) -> type[C]:
    """Give the class `getName` and `setName` for each parameter `name`."""
    for name, param in list(vars(cls).items()):
        if hasattr(param, "typeConverter"):  # a Param; the build of the site has a stand-in for that class
            words = "".join(word.capitalize() for word in name.split("_"))

            def get(self: Any, name: str = name) -> Any:
                return self.getOrDefault(name)

            def put(self: Any, value: Any, name: str = name) -> Any:
                return self._set(**{name: value})

            get.__doc__, put.__doc__ = f"Return {param.doc}.", f"Set {param.doc}; return this object."
            setattr(cls, f"get{words}", get)
            setattr(cls, f"set{words}", put)
    return cls


def check_names(params: Any, given: dict[str, Any]) -> None:
    """Raise UsageError if a name is not that of a parameter."""
    known = [param.name for param in params.params]
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"{type(params).__name__} has no parameters {unknown}: expected some of {', '.join(known)}"
        )


@_accessors
class ModelParams(Params):  # type: ignore[misc]
    """The parameters that the estimator and the model have."""

    model = _param("model", "the PyTorch module")
    feature_cols = _param(
        "feature_cols", "the columns that the module gets, an argument each", TypeConverters.toListString
    )
    label_cols = _param(
        "label_cols", "the columns that the losses get, one for each output", TypeConverters.toListString
    )
    input_shapes = _param("input_shapes", "the shapes of the module's arguments, with -1 for the rows")
    run_id = _param("run_id", "the name of the run in the store", TypeConverters.toString)


@_accessors
class EstimatorParams(ModelParams):
    """The parameters of the estimator alone."""

    num_proc = _param("num_proc", "the number of ranks", TypeConverters.toInt)
    backend = _param("backend", "where the ranks run, instead of num_proc")
    store = _param("store", "the folder for data and checkpoints: a RunStore or its URL")
    optimizer = _param("optimizer", "the PyTorch optimizer of the module's parameters")
    loss = _param("loss", "a function of output and label, or one for each label column")
    loss_weights = _param("loss_weights", "factors of the losses", TypeConverters.toListFloat)
    metrics = _param(
        "metrics", "functions of output and label, or for each label column a list or dict of them"
    )
    sample_weight_col = _param(
        "sample_weight_col", "the column of the rows' weights", TypeConverters.toString
    )
    label_shapes = _param("label_shapes", "the shapes of the labels, with -1 for the rows")
    validation = _param("validation", "a fraction of the rows, or the column that is above 0 for them")
    callbacks = _param("callbacks", "functions that each rank calls with an EpochEnd")
    gradient_compression = _param("gradient_compression", "the compression of gradients")
    batch_size = _param("batch_size", "the rows of a step on each rank", TypeConverters.toInt)
    val_batch_size = _param("val_batch_size", "the same in validation", TypeConverters.toInt)
    epochs = _param("epochs", "the number of epochs", TypeConverters.toInt)
    train_steps_per_epoch = _param("train_steps_per_epoch", "at most how many steps", TypeConverters.toInt)
    validation_steps_per_epoch = _param(
        "validation_steps_per_epoch", "the same in validation", TypeConverters.toInt
    )
    random_seed = _param("random_seed", "from which order and random numbers follow", TypeConverters.toInt)
    shuffle = _param("shuffle", "whether rows change their order", TypeConverters.toBoolean)
    shuffle_buffer_size = _param(
        "shuffle_buffer_size", "among how many rows each rank shuffles", TypeConverters.toInt
    )
    partitions_per_process = _param(
        "partitions_per_process", "the partitions of the data for each rank", TypeConverters.toInt
    )
    backward_passes_per_step = _param(
        "backward_passes_per_step", "how many batches make a step", TypeConverters.toInt
    )
    use_gpu = _param("use_gpu", "whether to train on GPUs", TypeConverters.toBoolean)
    verbose = _param("verbose", "0 for no progress lines", TypeConverters.toInt)


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
