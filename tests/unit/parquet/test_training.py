"""A batch as tensors, the loss of it, and what does not fit; a training on its way to the workers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.errors import UsageError
from ronde.parquet.store import RunStore
from ronde.parquet.training import (
    DATA,
    DataIndex,
    Training,
    check_shapes,
    load_training,
    rows_at_once,
    save_training,
)

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
        (dict(input_shapes=[[-1, 1]]), r"do not fit the shape \[-1, 1\]: expected -1 for the rows"),
        (dict(input_shapes=[[-1, 2, 1]]), r"fails for the first batch: .*'x' \(float64, shape \[8, 2\]\)"),
        (dict(losses=[torch.nn.CrossEntropyLoss()], outputs=2), r"cast the column \(df.withColumn\)"),
        (
            dict(label_cols=["y", "kind"], losses=[abs, abs]),
            r"returns 1 outputs, and label_cols are \['y', 'kind'\]",
        ),
        (dict(epochs=0), "epochs=0 is invalid: expected 1 or more"),
        (dict(input_shapes=[[-1], [-1]]), "input_shapes has 2 elements, and feature_cols 1"),
        (
            dict(input_shapes=[[2]]),
            r"\[2\] is the shape of one row of column 'x', and a batch has 8: write \[-1, 2\]",
        ),
        (dict(input_shapes=[[-1, -1]]), r"input_shapes=\[\[-1, -1\]\] is invalid: expected a shape for each"),
        (dict(input_shapes=[2]), r"input_shapes=\[2\] is invalid: expected a shape for each column, such as"),
        (dict(label_shapes=[[0]]), r"label_shapes=\[\[0\]\] is invalid"),
        (dict(label_cols=[]), "expected the name of at least one column each"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchObjective(training_of(**options)).evaluate(BATCH)


def rows_of(first: int, end: int) -> dict[str, Any]:
    return {name: array[first:end] for name, array in BATCH.items()}


def test_a_shape_without_a_number_of_rows_is_that_of_a_whole_batch() -> None:
    """As torch reshapes: [2] with a batch of one row, or [4, 2] with one of four. The last batch may have fewer."""
    training = training_of(model=torch.nn.Linear(2, 3), losses=[lambda output, label: output.sum()])
    plain = BatchObjective(training)
    for shape, sizes in (([2], [1, 1]), ([4, 2], [4, 3]), ([2, 2, 2], [4, 2])):
        reshaping = BatchObjective(replace(training, input_shapes=[shape], batch_size=sizes[0]))
        for rows in sizes:
            batch = rows_of(0, rows)
            evaluation = reshaping.evaluate(batch)
            assert evaluation.loss.item() == pytest.approx(plain.evaluate(batch).loss.item())
            assert (evaluation.rows, reshaping.output_sizes) == (rows, [3])


def test_shapes_are_checked_before_data_are_prepared() -> None:
    sizes = {"x": 2, "y": 1}
    check_shapes(training_of(input_shapes=[[2]], label_shapes=[[1]], batch_size=1), sizes)
    check_shapes(training_of(input_shapes=[[-1, 1, 2]], label_shapes=[[-1, 1]], val_batch_size=64), sizes)
    check_shapes(training_of(input_shapes=[[-1, 7]]), {"y": 1})  # without a row nothing is known
    for options, message in (
        (
            dict(input_shapes=[[-1, 3]]),
            r"input_shapes=\[\[-1, 3\]\], batch_size=32: column 'x' has 2 values in each",
        ),
        (
            dict(input_shapes=[[2]]),
            r"\[2\] is the shape of one row of column 'x', and a batch has 32: write \[-1, 2\]",
        ),
        (
            dict(input_shapes=[[2]], batch_size=1, val_batch_size=4),
            r"val_batch_size=4: \[2\] is the shape of one row",
        ),
        (dict(label_shapes=[[-1, 2]]), r"label_shapes=\[\[-1, 2\]\], batch_size=32: column 'y' has 1 values"),
    ):
        with pytest.raises(UsageError, match=message):
            check_shapes(training_of(**options), sizes)


def test_a_model_gets_as_many_rows_at_once_as_its_shapes_hold() -> None:
    assert rows_at_once(None, [2]) is None
    assert rows_at_once([[-1, 2]], [2]) is None
    assert rows_at_once([[2]], [2]) == 1
    assert rows_at_once([[-1, 3], [8, 2]], [3, 2]) == 8


def test_model_and_optimizer_travel_together(tmp_path: Path) -> None:
    folder = RunStore(tmp_path).run("one")
    digest = save_training(folder, training_of())
    with pytest.raises(ValueError, match="is empty on this host: the store"):
        load_training(folder, digest)
    folder.write(DATA, DataIndex("file:///data", [], []).to_json())
    training, data = load_training(folder, digest)
    assert data == DataIndex("file:///data", [], [])
    parameters = list(training.model.parameters())
    assert all(one is other for one, other in zip(parameters, training.optimizer.param_groups[0]["params"]))
    with open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match="cannot be sent"):
        save_training(folder, training_of(callbacks=[file.write]))
    assert pickle.dumps(folder)


def test_a_training_that_another_user_has_put_in_its_place_does_not_run(tmp_path: Path) -> None:
    folder, trace = RunStore(tmp_path).run("one"), tmp_path / "trace"
    digest = save_training(folder, training_of())
    folder.write(DATA, DataIndex("file:///data", [], []).to_json())
    folder.write("training.pkl", b"cposix\nsystem\n(S'touch %b'\ntR." % bytes(trace))
    with pytest.raises(
        UsageError, match=r"training\.pkl is not what the driver wrote, so Ronde does not run it"
    ):
        load_training(folder, digest)
    assert not trace.exists()
