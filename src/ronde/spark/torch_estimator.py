"""`ronde.spark.TorchEstimator`: writes a data frame to a store, trains a PyTorch model there, and returns a model.

The store also contains the model, the optimizer and the options, so Spark does not have to send them. The ranks run
where a backend starts them, by default in Spark tasks. Meanwhile a thread prints a line for each epoch.
"""

from __future__ import annotations

import copy
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from pyspark import SparkContext
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame

import ronde.spark
from ronde.errors import UsageError
from ronde.parquet.store import RunFolder, RunStore
from ronde.parquet.trainer import train_run
from ronde.parquet.training import DATA, Training, check_shapes, index_data, save_training, stored_row_sizes
from ronde.spark.frame_files import row_sizes, write_frame
from ronde.spark.ml_params import EstimatorParams, ObjectsReader, ObjectsWriter, check_names
from ronde.spark.torch_model import TorchModel

__all__ = ["EstimatorBackend", "SparkBackend", "TorchEstimator"]

PAUSE_S = 1.0  # between looks into the folder of a run: a store announces nothing
DEFAULTS: dict[str, Any] = {  # all others are None
    "metrics": [],
    "callbacks": [],
    "batch_size": 32,
    "epochs": 1,
    "random_seed": 0,
    "shuffle": True,
    "backward_passes_per_step": 1,
    "use_gpu": True,
    "verbose": 1,
}
# Fields of a Training whose parameter has another name, which is Horovod's.
_NAMES = {
    "compression": "gradient_compression",
    "losses": "loss",
    "seed": "random_seed",
    "shuffle_buffer_rows": "shuffle_buffer_size",
}
_REQUIRED = ("model", "optimizer", "loss", "feature_cols", "label_cols", "store")


class EstimatorBackend(Protocol):
    """Calls a function on every rank of a job. An object with these methods is a `backend` of a TorchEstimator."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank.

        Args:
            fn: A function that cloudpickle can send. It calls `ronde.init()`.
            args: Positional arguments, the same for all ranks (default: none).
            kwargs: Keyword arguments, the same for all ranks (default: none).
            env: Variables for the ranks (default: none).

        Raises:
            WorkerError: A rank failed.
        """

    def num_processes(self) -> int:
        """Return the number of ranks.

        Raises:
            UsageError: It is not known.
        """


class SparkBackend:
    """Runs an estimator's ranks in Spark tasks, by `ronde.spark.run`.

        backend = SparkBackend(num_proc=4, start_timeout=1800)

    Args:
        num_proc: The number of ranks (default: as of `ronde.spark.run`).
        env: Variables for the ranks (default: none).
        options: Further arguments of `ronde.spark.run`, such as `start_timeout`, `nics`, `stdout` or `encrypt`.

    Raises:
        Nothing: `run` checks the options.
    """

    __module__ = "ronde.spark"  # so the pickle in a saved estimator names the class by its public place

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), options

    def __getstate__(self) -> dict[str, Any]:
        options = {name: it for name, it in self._options.items() if name not in ("stdout", "stderr")}
        return {**self.__dict__, "_options": options}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results by rank.

        Args:
            fn: Any function that cloudpickle can send.
            args: Positional arguments, the same for all ranks (default: none).
            kwargs: Keyword arguments, the same for all ranks (default: none).
            env: Variables for the ranks, which override those of the backend (default: none).

        Raises:
            WorkerError: A rank failed (`.rank`, `.host`, `.traceback_text`), or its task was lost. All ranks have
                ended.
            TimeoutError: Spark had too few free slots within `start_timeout`.
            UsageError: An argument is invalid, or there is no Spark session.
        """
        everything = {**self._env, **(env or {})}
        return ronde.spark.run(fn, args, kwargs, self._num_proc, env=everything, **self._options)

    def num_processes(self) -> int:
        """Return the number of ranks.

        Raises:
            UsageError: `num_proc` is missing, and there is no Spark session or it is one of Spark Connect.
        """
        if self._num_proc is not None:
            return self._num_proc
        context = SparkContext._active_spark_context
        if context is None:
            raise UsageError("num_proc is missing: Spark Connect does not report the number of slots")
        return int(context.defaultParallelism)


class TorchEstimator(Estimator, EstimatorParams, MLReadable, MLWritable):  # type: ignore[misc]
    """Trains a PyTorch model on a data frame, in workers on the executors; `fit` returns a TorchModel.

        estimator = TorchEstimator(num_proc=4, store="hdfs:///ronde", model=model, optimizer=optimizer,
                                   loss=torch.nn.MSELoss(), feature_cols=["features"], label_cols=["y"], epochs=10)
        predicted = estimator.fit(train_frame).transform(test_frame)

    Each parameter has a setter and a getter, such as `setBatchSize` and `getBatchSize`.

    Args:
        num_proc: The number of ranks (default: as of `ronde.spark.run`).
        backend: Where the ranks run, instead of `num_proc` (default: `SparkBackend(num_proc)`).
        store: A RunStore, or the path or URL of a folder that the driver and all executors share.
        model: A torch module. It gets a tensor for each feature column, and returns one for each label column.
        optimizer: A torch optimizer of its parameters.
        loss: A function of output and label, or a list of one for each label column.
        loss_weights: Factors of the losses (default: 1).
        metrics: A list or dict of functions of output and label, or one for each label column (default: none).
        feature_cols: The names of columns with numbers, Spark vectors or arrays.
        label_cols: The names of such columns.
        sample_weight_col: The column with the weights of the rows (default: none).
        input_shapes: For each feature column the shape of the tensor, with -1 for the rows, or that of a whole batch,
            such as [[2]] with a `batch_size` of 1 (default: as in the frame).
        label_shapes: The same for the labels (default: that of the output, if it has as many values).
        validation: The fraction of the rows for validation, or a column that is above 0 for them (default: none).
        batch_size: The rows of a step on each rank (default: 32).
        val_batch_size: The same in validation (default: `batch_size`).
        epochs: The number of epochs, also counting those that the run has already (default: 1).
        train_steps_per_epoch: At most how many steps an epoch has (default: until all rows are read).
        validation_steps_per_epoch: The same in validation.
        shuffle: Whether the order of the rows changes from epoch to epoch (default: true).
        shuffle_buffer_size: Among how many rows each rank shuffles (default: 16,384).
        random_seed: From which the order and random numbers follow (default: 0).
        partitions_per_process: Into how many partitions for each rank the frame is dealt first (default: as it is).
        backward_passes_per_step: How many batches add up gradients before a step (default: 1).
        gradient_compression: As of `ronde.torch.DistributedOptimizer` (default: none).
        callbacks: Functions that each rank calls with an `ronde.parquet.EpochEnd` after an epoch; training ends if one
            returns True (default: none).
        use_gpu: Whether to train on GPUs, where there are some (default: true).
        run_id: The name of the run. An existing run continues after its newest checkpoint (default: a new run).
        verbose: 0 for no progress lines (default: 1).

    Raises:
        UsageError: A name is not a parameter.
        TypeError: A value has the wrong type.
    """

    __module__ = "ronde.spark"  # so the metadata of a saved estimator name the class by its public place
    saved_attributes = ()

    def __init__(self, **params: Any) -> None:
        super().__init__()
        check_names(self, params)
        self._setDefault(**{param.name: None for param in self.params} | DEFAULTS)
        self._set(**{name: value for name, value in params.items() if value is not None})

    def setParams(self, **params: Any) -> TorchEstimator:  # noqa: N802 - Spark's name
        """Set several parameters; return this object.

        Args:
            params: Parameters of the class by name: `setParams(epochs=10, batch_size=64)`.

        Raises:
            UsageError: A name is not a parameter.
            TypeError: A value has the wrong type.
        """
        check_names(self, params)
        estimator: TorchEstimator = self._set(**params)
        return estimator

    def fit_on_parquet(self, train: str, validation: str | None = None) -> TorchModel:
        """Train on Parquet files that are there already; return the model.

        Args:
            train: A folder's path or URL, which the driver and all executors reach. Vectors must be arrays.
            validation: The folder with the data for validation, in the same file system (default: none).

        Raises:
            UsageError: A folder has no rows or lacks a column, or a parameter is missing or invalid.
            WorkerError: As of `ronde.spark.run`.
        """
        training, run = self._training(), self._run()
        index = index_data(train, validation, training.columns, run.store.options)
        if training.input_shapes or training.label_shapes:
            check_shapes(training, stored_row_sizes(index, training.columns, run.store.options))
        run.write(DATA, index.to_json())
        return self._train(training, run)

    def write(self) -> ObjectsWriter:
        """Return what writes this estimator: `estimator.write().overwrite().save(path)`. Raises nothing."""
        return ObjectsWriter(self)

    @classmethod
    def read(cls) -> ObjectsReader:
        """Return what reads an estimator: `TorchEstimator.read().load(path)`. Loading runs code in the files.

        Raises nothing.
        """
        return ObjectsReader(cls)

    def _fit(self, dataset: DataFrame) -> TorchModel:
        training, run = self._training(), self._run()
        if run.read(DATA) is None:  # else a job of this run was ended, and its data are there
            if training.input_shapes or training.label_shapes:
                check_shapes(training, row_sizes(dataset, [*training.feature_cols, *training.label_cols]))
            per_rank = self.getOrDefault("partitions_per_process")
            index = write_frame(
                dataset,
                run,
                training.columns,
                self.getOrDefault("validation"),
                training.seed,
                per_rank and per_rank * self._backend().num_processes(),
            )
            run.write(DATA, index.to_json())
        return self._train(training, run)

    def _train(self, training: Training, run: RunFolder) -> TorchModel:
        digest = save_training(run, training)
        with _FollowedRun(run, training.epochs, self.getOrDefault("verbose") > 0):
            self._backend().run(train_run, (run, digest))
        epochs = run.epochs()
        state = run.load_epoch(epochs[-1])
        trained = copy.deepcopy(training.model)
        trained.load_state_dict(state["model"])
        run.remove(DATA, "data", "training.pkl")
        model = self._new_model(
            model=trained,
            feature_cols=list(training.feature_cols),
            label_cols=list(training.label_cols),
            input_shapes=training.input_shapes,
            run_id=run.run_id,
        )
        model.history = [run.metrics(epoch) for epoch in epochs]
        model.output_sizes = list(state["output_sizes"])
        return model

    def _new_model(self, **params: Any) -> TorchModel:
        return TorchModel(**params)

    def _backend(self) -> EstimatorBackend:
        given: EstimatorBackend | None = self.getOrDefault("backend")
        return given or SparkBackend(self.getOrDefault("num_proc"), verbose=self.getOrDefault("verbose"))

    def _run(self) -> RunFolder:
        store = self.getOrDefault("store")
        store = store if isinstance(store, RunStore) else RunStore(store)
        new = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return store.run(self.getOrDefault("run_id") or new)

    def _training(self) -> Training:
        missing = [name for name in _REQUIRED if self.getOrDefault(name) is None]
        if missing:
            raise UsageError(f"TorchEstimator lacks {', '.join(missing)}: give them to it, or set them")
        given = {
            field.name: self.getOrDefault(_NAMES.get(field.name, field.name)) for field in fields(Training)
        }
        given["losses"] = _listed(given["losses"])
        given["metrics"] = _by_label(given["metrics"], len(given["label_cols"]))
        return Training(**{name: value for name, value in given.items() if value is not None})


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _by_label(metrics: Any, labels: int) -> list[Mapping[str, Callable[..., Any]]]:
    """Return a dict of metrics for each label, from a dict or list for all of them or from a list of those."""
    each = list(metrics) if isinstance(metrics, Sequence) else [metrics]
    if not isinstance(metrics, Sequence) or any(callable(one) for one in each):
        each = [metrics] * labels
    return [
        one if isinstance(one, Mapping) else {_name(function): function for function in one} for one in each
    ]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _FollowedRun:
    """Prints the epochs of a run within a `with` block, if it is talkative."""

    def __init__(self, run: RunFolder, epochs: int, is_talkative: bool) -> None:
        self._run, self._epochs = run, epochs
        self._shown = set(run.epochs())
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ronde-progress", daemon=True)
        self._is_talkative = is_talkative

    def __enter__(self) -> None:
        if not self._is_talkative:
            return
        begun = f" after epoch {len(self._shown)}" if self._shown else ""
        print(f"Ronde: run {self._run.run_id} begins{begun}", file=sys.stderr)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        if self._is_talkative:
            self._thread.join()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._has_ended.wait(PAUSE_S)
            try:
                for epoch in self._run.epochs():
                    if epoch not in self._shown:
                        self._shown.add(epoch)
                        text = _describe_epoch(self._run.metrics(epoch))
                        print(
                            f"Ronde: epoch {epoch + 1} of {self._epochs}: {text}", file=sys.stderr, flush=True
                        )
            except OSError:  # the ranks report what is wrong with the store
                continue


def _describe_epoch(metrics: dict[str, Any]) -> str:
    """Return metrics in a line: `loss 0.31, validation loss 0.4 (2.1 s)`."""
    values = [f"{name} {value:.4g}" for name, value in metrics["train"].items()]
    values += [f"validation {name} {value:.4g}" for name, value in metrics.get("validation", {}).items()]
    return f"{', '.join(values)} ({metrics['seconds']:.1f} s)"
