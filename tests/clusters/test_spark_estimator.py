"""`ronde.spark.TorchEstimator` on a real Spark with two executors: a frame in, a model out, and mistakes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clusters.spark_session import PATIENCE_S, session_of_two_executors

import ronde
from ronde.errors import UsageError, WorkerError
from ronde.parquet import EpochEnd, RunStore

pytestmark = [pytest.mark.spark, pytest.mark.slow]
spark: Any = pytest.importorskip("ronde.spark", reason="PySpark is not installed here")
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed here")
pytest.importorskip("pandas", reason="pandas is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

ROWS = 80


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with session_of_two_executors() as session:
        yield session


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """Rows of a vector x, an array z, y = 2 x0 - x1, its sign, weights, text, and a number to split by."""
    from pyspark.ml.linalg import Vectors

    x = np.random.default_rng(3).normal(size=(ROWS, 2))
    y = 2 * x[:, 0] - x[:, 1]
    rows = [
        (Vectors.dense(x[row]), [float(v) for v in x[row]], float(y[row]), int(y[row] > 0), "a", row % 4)
        for row in range(ROWS)
    ]
    return session.createDataFrame(rows, ["x", "z", "y", "kind", "text", "part"])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ronde-estimator-") as name:
        yield Path(name)


def estimator_in(folder: Path, **params: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    defaults = {
        "num_proc": 2,
        "store": str(folder),
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.2),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 2,
        "verbose": 0,
    }
    return spark.TorchEstimator(**{**defaults, **params})


def fail_after_first_epoch(end: EpochEnd) -> None:
    if ronde.rank() == 0:
        raise LookupError("the machine is lost")


def test_fits_predicts_and_is_saved(session: Any, frame: Any, folder: Path, capfd: Any) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    estimator = estimator_in(
        folder, epochs=8, validation=0.25, metrics=[torch.nn.functional.l1_loss], verbose=1
    )
    assert estimator.getEpochs() == 8
    estimator.save(str(folder / "estimator"))
    again = spark.TorchEstimator.load(str(folder / "estimator"))
    assert (again.getEpochs(), again.getFeatureCols(), again.uid) == (8, ["x"], estimator.uid)
    assert again.getOptimizer().param_groups[0]["params"][0] is next(iter(again.getModel().parameters()))

    model = Pipeline(stages=[again]).fit(frame)
    trained = model.stages[0]
    assert [entry["epoch"] for entry in trained.history] == list(range(8))
    first, last = trained.history[0], trained.history[-1]
    assert last["validation"]["loss"] < 0.3 * first["train"]["loss"]
    assert set(last["train"]) == set(last["validation"]) == {"loss", "l1_loss"}
    assert "Ronde: epoch 8 of 8: loss " in capfd.readouterr().err
    assert not (folder / "runs" / trained.getRunId() / "data").exists(), "the copy of the frame is removed"

    model.save(str(folder / "model"))
    loaded = PipelineModel.load(str(folder / "model"))
    assert loaded.stages[0].history == trained.history
    (metadata,) = (folder / "model" / "stages").glob("*/metadata/part-00000*")
    assert '"class":"ronde.spark.TorchModel"' in metadata.read_text(), "a file must not name a private module"
    predicted = loaded.transform(frame).select("x", "y", "y__output").collect()
    weights = trained.getModel()
    for row in predicted:
        assert row.y__output == pytest.approx(weights(torch.tensor(row.x.toArray()).float()).item(), abs=1e-4)
    assert len(predicted) == ROWS


class TwoHeads(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.number, self.kinds = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

    def forward(self, x: Any, z: Any) -> Any:
        return self.number(x), self.kinds(z.flatten(1))


def test_several_columns_and_shapes(frame: Any, folder: Path) -> None:
    model = TwoHeads()
    trained = estimator_in(
        folder,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=[torch.nn.MSELoss(), torch.nn.CrossEntropyLoss()],
        feature_cols=["x", "z"],
        label_cols=["y", "kind"],
        sample_weight_col="part",
        validation="part",
        input_shapes=[[-1, 2], [-1, 2, 1]],
        partitions_per_process=1,
        epochs=1,
    )
    # Rows with part > 0 are for validation; the others have the weight 0, so nothing is learned.
    fitted = trained.fit(frame)
    for before, after in zip(model.parameters(), fitted.getModel().parameters()):
        assert torch.equal(before, after)
    assert fitted.history[0]["train"]["loss"] == 0.0
    assert fitted.history[0]["validation"]["loss"] > 0.0
    row = fitted.setOutputCols(["number", "scores"]).transform(frame).first()
    assert isinstance(row.number, float)
    assert row.scores.toArray().shape == (2,)


def test_a_failed_run_goes_on_with_its_data(frame: Any, folder: Path) -> None:
    with pytest.raises(WorkerError, match="the machine is lost"):
        estimator_in(folder, run_id="mine", callbacks=[fail_after_first_epoch]).fit(frame)
    assert RunStore(folder).run("mine").epochs() == [0]
    whole = estimator_in(folder, run_id="other").fit(frame)
    model = estimator_in(folder, run_id="mine").fit(frame.limit(0))  # its data are in the store
    assert [entry["train"] for entry in model.history] == [entry["train"] for entry in whole.history]


def test_parquet_that_is_there_already(frame: Any, folder: Path) -> None:
    frame.select("z", "y").write.parquet(f"file://{folder}/data")
    estimator = estimator_in(folder, feature_cols=["z"], num_proc=1, epochs=1)
    model = estimator.fit_on_parquet(f"{folder}/data", f"{folder}/data")
    assert model.history[0]["validation"]["loss"] > 0
    assert (folder / "data").exists()


def test_mistakes_are_named(frame: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    holes = frame.withColumn("y", F.when(F.col("part") > 0, F.col("y")))
    cases: list[tuple[dict[str, Any], Any, str]] = [
        (dict(feature_cols=["w"]), frame, r"lacks the columns \['w'\]: it has \['x', 'z'"),
        (dict(feature_cols=["text"]), frame, r"'text' has the type string: expected numbers"),
        (dict(validation="w"), frame, r"validation='w' is not a column"),
        (dict(validation=1.5), frame, r"validation=1.5 is invalid"),
        (dict(validation=1e-9), frame, r"selects none of 80 rows"),
        (dict(loss=None), frame, r"lacks loss: give them"),
        (dict(), frame.limit(0), r"no rows are left for training: the data frame has 0 rows"),
        (dict(), holes, r"'y' has 20 missing values"),
        (dict(), frame.selectExpr("if(part = 1, null, x) as x", "y"), r"'x' has 20 missing values"),
        (
            dict(feature_cols=["z"]),
            frame.selectExpr("array(z[0], if(part = 1, null, z[1])) as z", "y"),
            r"'z' has 20 rows with missing values inside .* df.dropna\(\) keeps them",
        ),
        (
            dict(feature_cols=["z"]),
            frame.selectExpr("array(z[0], if(part = 1, double('nan'), z[1])) as z", "y"),
            r"'z' has 20 rows with NaN or infinite values",
        ),
        (
            dict(),
            frame.selectExpr("x", "if(part = 1, double('-infinity'), y) as y"),
            r"'y' has 20 rows with NaN or infinite values",
        ),
    ]
    for params, data, message in cases:
        with pytest.raises(UsageError, match=message):
            estimator_in(folder, **params).fit(data)
    with pytest.raises(UsageError, match=r"no parameters \['epoch'\]: expected some of .*epochs"):
        estimator_in(folder, epoch=1)
    with pytest.raises(WorkerError, match=r"the model, a loss or a metric fails for the first batch"):
        estimator_in(folder, input_shapes=[[-1, 1, 2, 1]], epochs=1).fit(frame)


def test_wrong_shapes_are_refused_before_data_are_prepared(frame: Any, folder: Path) -> None:
    frame.select("z", "y").write.parquet(f"file://{folder}/data")
    for params, message in (
        (
            dict(feature_cols=["x"], input_shapes=[[2]]),
            r"\[2\] is the shape of one row of column 'x', and a batch has 8",
        ),
        (
            dict(feature_cols=["z"], input_shapes=[[-1, 3]]),
            r"column 'z' has 2 values in each row, which do not fit",
        ),
        (
            dict(feature_cols=["z"], label_shapes=[[-1, 2]]),
            r"label_shapes=.*: column 'y' has 1 values in each row",
        ),
    ):
        estimator = estimator_in(folder, run_id="refused", **params)
        with pytest.raises(UsageError, match=message):
            estimator.fit(frame)
        if params["feature_cols"] == ["z"]:
            with pytest.raises(UsageError, match=message):
                estimator.fit_on_parquet(f"{folder}/data")
    assert not (folder / "runs" / "refused").exists()


@pytest.fixture
def alias(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports modules of Horovod, which are Ronde's."""
    import ronde.compat

    monkeypatch.syspath_prepend(ronde.compat.PACKAGES)
    return importlib.import_module


def test_shapes_and_names_of_horovods_estimator(alias: Any, frame: Any, folder: Path) -> None:
    """A shape without rows and batches of one row, as in Horovod's own test; its names of the model's parameters."""
    theirs = alias("horovod.spark.torch")
    assert theirs.TorchEstimator is alias("horovod.spark.torch.estimator").TorchEstimator
    bases = alias("horovod.spark.common.estimator")
    params = alias("horovod.spark.common.params")
    model = torch.nn.Linear(2, 1)
    estimator = theirs.TorchEstimator(
        num_proc=2,
        store=alias("horovod.spark.common.store").LocalStore(str(folder)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        input_shapes=[[2]],
        feature_cols=["x"],
        label_cols=["y"],
        sample_weight_col="part",
        batch_size=1,
        epochs=2,
        random_seed=1,
        verbose=0,
    )
    assert isinstance(estimator, bases.HorovodEstimator)
    assert isinstance(estimator, params.EstimatorParams)
    trained = estimator.fit(frame)
    assert isinstance(trained, theirs.TorchModel)
    assert isinstance(trained, bases.HorovodModel)
    losses = [epoch["train"]["loss"] for epoch in trained.getHistory()]
    assert losses[1] < losses[0]
    assert (trained.getFeatureColumns(), trained.getLabelColumns()) == (["x"], ["y"])
    # Made by hand, the model finds out that its output is one number.
    made = theirs.TorchModel(
        history=trained.getHistory(),
        model=trained.getModel(),
        feature_columns=["x"],
        input_shapes=[[2]],
        label_columns=["y"],
        run_id="mine",
        _metadata={},
    )
    assert made.getHistory() == trained.getHistory()
    both = (
        made.setOutputCols(["made"])
        .transform(trained.transform(frame))
        .select("x", "y__output", "made")
        .collect()
    )
    for row in both:
        expected = trained.getModel()(torch.tensor(row.x.toArray()).float()).item()
        assert row.made == row.y__output == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UsageError, match=r"no parameters \['columns'\]"):
        theirs.TorchModel(columns=["x"])


def test_horovods_modules_for_estimators(alias: Any, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    util = alias("horovod.spark.common.util")
    assert util.host_hash() == util.host_hash() != util.host_hash("salt")
    assert util.to_list(1, 2) == util.to_list([1], 2) == [1, 1]
    assert util.to_list(None, 2) is None
    with pytest.raises(ValueError, match="expected 1 or 3"):
        util.to_list([1, 2], 3)
    assert util.get_output_cols(frame.schema, ["more"]) == [*frame.columns, "more"]
    util.check_validation(0.25, frame)
    util.check_validation("part", frame)
    for wrong in (1.0, "no"):
        with pytest.raises(ValueError, match="validation="):
            util.check_validation(wrong, frame)
    assert not util.is_databricks()
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    assert util.is_databricks()
    with pytest.raises(ImportError, match=r"TorchEstimator\.fit writes the data frame itself"):
        _ = util.prepare_data
    for module, instead in (
        ("horovod.spark.lightning", "or call a function with a Lightning Trainer by horovod.spark.run"),
        ("horovod.spark.lightning.estimator", "by horovod.spark.torch.TorchEstimator"),
        ("horovod.spark.keras", "by horovod.spark.torch.TorchEstimator"),
    ):
        with pytest.raises(ModuleNotFoundError, match=instead):
            alias(module)


_HOROVOD = """
import sys

import ronde.compat
import horovod.spark.torch as hvd
import numpy as np
import pyspark.sql.types as T
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

if __name__ == "__main__":
    folder = sys.argv[1]
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    store = Store.create(folder)
    df = spark.read.format("libsvm").option("numFeatures", "16").load(folder + "/images.libsvm")
    encoder = OneHotEncoder(inputCols=["label"], outputCols=["label_vec"], dropLast=False)
    train_df, test_df = encoder.fit(df).transform(df).randomSplit([0.8, 0.2], seed=1)

    class Net(nn.Module):
        def __init__(self):
            super(Net, self).__init__()
            self.conv = nn.Conv2d(1, 4, kernel_size=2)
            self.fc = nn.Linear(36, 2)

        def forward(self, features):
            x = F.relu(self.conv(features.float()))
            return F.log_softmax(self.fc(x.view(-1, 36)), dim=1)

    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    loss = nn.NLLLoss()
    backend = SparkBackend(num_proc=2, stdout=sys.stdout, stderr=sys.stderr, prefix_output_with_timestamp=True)
    torch_estimator = hvd.TorchEstimator(
        backend=backend,
        store=store,
        model=model,
        optimizer=optimizer,
        loss=lambda input, target: loss(input, target.long()),
        input_shapes=[[-1, 1, 4, 4]],
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=6,
        validation=0.1,
        backward_passes_per_step=1,
        verbose=1,
    )
    torch_model = torch_estimator.fit(train_df).setOutputCols(["label_prob"])
    pred_df = torch_model.transform(test_df)
    argmax = udf(lambda v: float(np.argmax(v)), returnType=T.DoubleType())
    pred_df = pred_df.withColumn("label_pred", argmax(pred_df.label_prob))
    evaluator = MulticlassClassificationEvaluator(
        predictionCol="label_pred", labelCol="label", metricName="accuracy"
    )
    print("Test accuracy:", evaluator.evaluate(pred_df))
    spark.stop()
"""


def test_a_program_for_horovods_estimator_runs_unchanged(tmp_path: Path) -> None:
    """Images of 4 by 4 whose upper or lower half is bright, in the steps of Horovod's example for MNIST."""
    order = np.random.default_rng(5)
    lines = []
    for row in range(200):
        image = order.random(16) * 0.5
        image[:8] += row % 2
        lines.append(
            f"{row % 2} " + " ".join(f"{place + 1}:{value:.3f}" for place, value in enumerate(image))
        )
    (tmp_path / "images.libsvm").write_text("\n".join(lines))
    (tmp_path / "mnist.py").write_text(_HOROVOD)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mnist.py"), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"Test accuracy: (.*)", done.stdout)
    assert float(accuracy) > 0.9
    assert "Ronde: epoch 6 of 6: loss " in done.stderr
