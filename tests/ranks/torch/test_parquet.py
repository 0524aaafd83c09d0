"""Training on Parquet files: as one process would train, the same on every rank, and again after a failure."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.errors import RemoteError
from ronde.parquet import EpochEnd, RunStore, Training, fit_on_parquet
from ronde.testing import ranks

torch: Any = pytest.importorskip("torch")
pa: Any = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

pytestmark = pytest.mark.slow
ROWS = 50


def write(folder: Path, rows: int = ROWS, files: int = 3) -> str:
    """Write rows of x, with y = 2 x0 - x1, the class of y, and weights that are 0 for each second row."""
    from pyarrow import parquet

    x = np.random.default_rng(7).normal(size=(rows, 2))
    y = 2 * x[:, 0] - x[:, 1]
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        columns = {
            "x": list(x[part]),
            "y": y[part],
            "kind": (y[part] > 0).astype("int32"),
            "weight": (part % 2).astype(float),
        }
        parquet.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=6)
    return str(folder)


def absolute(output: Any, label: Any) -> Any:
    return (output - label).abs().mean()


class Fails:
    """A callback that fails after an epoch, on the rank that has written its checkpoint."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def __call__(self, end: EpochEnd) -> None:
        if end.epoch == self._epoch and ronde.rank() == 0:
            raise LookupError("the machine is lost")


def regression(**options: Any) -> Training:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    options = {"metrics": [{"absolute": absolute}], "epochs": 3, "batch_size": 8, **options}
    return Training(model, optimizer, [torch.nn.MSELoss()], ["x"], ["y"], **options)


def fit(size: int, training: Training, folder: str, run_id: str, validation: str | None = None) -> list[Any]:
    """Return the history and the parameters of each rank. What is pickled here travels as bytes."""
    return ranks.run(fit_here, size, pickle.dumps(training), folder, run_id, validation)


def fit_here(content: bytes, folder: str, run_id: str, validation: str | None) -> Any:
    training = pickle.loads(content)
    store = RunStore(Path(folder).parent / "store")
    history = fit_on_parquet(training, folder, validation, store=store, run_id=run_id)
    ronde.shutdown()
    for entry in history:
        assert entry.pop("seconds") >= 0
    return history, [each.tolist() for each in training.model.parameters()]


def test_learns_with_equal_steps_and_metrics_of_all_ranks(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    validation = write(tmp_path / "validation", rows=7)
    training = regression(epochs=20, val_batch_size=2)
    for size in (1, 2):
        found = fit(size, training, folder, f"of-{size}", validation)
        assert all(each == found[0] for each in found)
        history, (weight, _) = found[0]
        assert [entry["epoch"] for entry in history] == list(range(20))
        assert history[-1]["train"]["loss"] < 0.1 * history[0]["train"]["loss"]
        assert weight[0] == pytest.approx([2.0, -1.0], abs=0.3)
        # All rows count once in validation, whatever the number of ranks.
        x = np.random.default_rng(7).normal(size=(7, 2))
        model = torch.nn.Linear(2, 1)
        model.load_state_dict(RunStore(tmp_path / "store").run(f"of-{size}").load_epoch(19)["model"])
        difference = model(torch.tensor(x, dtype=torch.float32))[:, 0].detach().numpy() - (
            2 * x[:, 0] - x[:, 1]
        )
        assert history[-1]["validation"]["loss"] == pytest.approx(np.mean(difference**2), rel=1e-3)
        assert history[-1]["validation"]["absolute"] == pytest.approx(np.mean(abs(difference)), rel=1e-3)


def test_a_run_goes_on_after_its_newest_checkpoint_as_if_it_had_not_failed(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    (whole, _) = fit(2, regression(), folder, "whole")
    with pytest.raises(RemoteError, match="the machine is lost"):
        fit(2, regression(callbacks=[Fails(1)]), folder, "parts")
    assert RunStore(tmp_path / "store").run("parts").epochs() == [0, 1]
    assert fit(2, regression(), folder, "parts")[0] == whole
    # Another model is an error, not a wrong result.
    assert fit(2, regression(), folder, "parts")[0] == whole
    other = torch.nn.Linear(2, 5)
    another = Training(other, torch.optim.Adam(other.parameters()), [torch.nn.MSELoss()], ["x"], ["y"])
    with pytest.raises(RemoteError, match=r"is of another model or optimizer. Give this run another run_id"):
        fit(1, another, folder, "parts")


class TwoHeads(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.number, self.kinds = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.number(x.float()), self.kinds(x)


def stop_at_once(end: EpochEnd) -> bool:
    return ronde.rank() == 1


def test_several_labels_weights_accumulated_batches_and_an_early_end(tmp_path: Path) -> None:
    folder = write(tmp_path / "train")
    model = TwoHeads()
    training = Training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        [torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss()],
        ["x"],
        ["y", "kind"],
        metrics=[{"absolute": absolute}, {}],
        loss_weights=[1.0, 0.5],
        sample_weight_col="weight",
        batch_size=4,
        train_steps_per_epoch=5,
        backward_passes_per_step=2,
        epochs=3,
        callbacks=[stop_at_once],
    )
    ((history, _), _) = fit(2, training, folder, "one")
    assert [sorted(entry["train"]) for entry in history] == [["absolute_y", "loss"]]
    assert RunStore(tmp_path / "store").run("one").load_epoch(0)["output_sizes"] == [1, 2]
