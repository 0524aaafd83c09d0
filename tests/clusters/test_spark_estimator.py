"""`ronde.spark.TorchEstimator` on a real Spark with two executors: a frame in, a model out, and mistakes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clusters.spark_session import session_of_two_executors

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
    ]
    for params, data, message in cases:
        with pytest.raises(UsageError, match=message):
            estimator_in(folder, **params).fit(data)
    with pytest.raises(UsageError, match=r"no parameters \['epoch'\]: expected some of .*epochs"):
        estimator_in(folder, epoch=1)
    with pytest.raises(WorkerError, match=r"the model, a loss or a metric fails for the first batch"):
        estimator_in(folder, input_shapes=[[-1, 1, 2, 1]], epochs=1).fit(frame)
