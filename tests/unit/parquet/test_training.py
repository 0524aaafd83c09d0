"""A batch as tensors, the loss of it, and what does not fit; a training on its way to the workers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.parquet.store import RunStore
from ronde.parquet.training import DATA, DataIndex, Training, load_training, save_training

torch: Any = pytest.importorskip("torch")
BatchObjective: Any = pytest.importorskip("ronde.parquet.objective").BatchObjective

BATCH = {
    "x": np.arange(16.0).reshape(8, 2),
    "y": np.arange(8.0),
    "kind": np.arange(8, dtype=np.int16) % 2,
    "weight": np.array([0.0] * 7 + [8.0]),
}


def training_of(outputs: int = 1, **options: Any) -> Training:
    model = torch.nn.Linear(2, outputs)
    optimizer = torch.optim.Adam(model.parameters())
    return Training(
        **{
            "model": model,
            "optimizer": optimizer,
            "losses": [torch.nn.MSELoss()],
            "feature_cols": ["x"],
            "label_cols": ["y"],
            **options,
        }
    )


def test_labels_take_the_shape_of_outputs_and_weights_count() -> None:
    training = training_of()
    loss = BatchObjective(training).evaluate(BATCH).loss
    difference = training.model(torch.tensor(BATCH["x"]).float())[:, 0] - torch.arange(8.0)
    assert loss.item() == pytest.approx(difference.square().mean().item())
    for each in (torch.nn.MSELoss(), torch.nn.functional.mse_loss):
        weighted = training_of(model=training.model, losses=[each], sample_weight_col="weight")
        value = BatchObjective(weighted).evaluate(BATCH).loss.item()
        assert value == pytest.approx(difference[-1].square().item())


def test_integers_are_classes() -> None:
    objective = BatchObjective(training_of(2, label_cols=["kind"], losses=[torch.nn.CrossEntropyLoss()]))
    assert objective.evaluate(BATCH).rows == 8
    assert objective.output_sizes == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(input_shapes=[[-1, 3]]), r"'x' has 2 values in each row, which do not fit the shape \[-1, 3\]"),
        (dict(input_shapes=[[-1, 1]]), r"makes 16 rows of 8: expected -1 first"),
        (dict(input_shapes=[[-1, 2, 1]]), r"fails for the first batch: .*'x' \(float64, shape \[8, 2\]\)"),
        (dict(losses=[torch.nn.CrossEntropyLoss()], outputs=2), r"cast the column \(df.withColumn\)"),
        (
            dict(label_cols=["y", "kind"], losses=[abs, abs]),
            r"returns 1 outputs, and label_cols are \['y', 'kind'\]",
        ),
        (dict(epochs=0), "epochs=0 is invalid: expected 1 or more"),
        (dict(input_shapes=[[-1], [-1]]), "input_shapes has 2 elements, and feature_cols 1"),
        (dict(label_cols=[]), "expected the name of at least one column each"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchObjective(training_of(**options)).evaluate(BATCH)


def test_model_and_optimizer_travel_together(tmp_path: Path) -> None:
    folder = RunStore(tmp_path).run("one")
    save_training(folder, training_of())
    with pytest.raises(ValueError, match="is empty on this host: the store"):
        load_training(folder)
    folder.write(DATA, DataIndex("file:///data", [], []).to_json())
    training, data = load_training(folder)
    assert data == DataIndex("file:///data", [], [])
    parameters = list(training.model.parameters())
    assert all(one is other for one, other in zip(parameters, training.optimizer.param_groups[0]["params"]))
    with open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match="cannot be sent"):
        save_training(folder, training_of(callbacks=[file.write]))
    assert pickle.dumps(folder)
