"""Models of XGBoost and LightGBM: what they predict is the same here, and ours there.

`record_models.py` has made the files of `models/`. The libraries themselves need not be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from tests.unit.ml.trees.record_models import FOLDER, classes_of, make_rows, recorded_rows

from ronde.errors import UsageError
from ronde.ml import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    load,
    load_lightgbm,
    load_xgboost,
)

X, Y = make_rows()
ROWS = recorded_rows(X)
CATEGORICAL: dict[str, Any] = {"categorical_features": [3], "max_iter": 5, "random_state": 0}
FILES = sorted(path.name for path in FOLDER.iterdir() if "expected" not in path.name)


def predictions_of(model: Any, rows: Any = ROWS) -> Any:
    """What both libraries call predictions."""
    if not hasattr(model, "predict_proba"):
        return model.predict(rows)
    probabilities = model.predict_proba(rows)
    return probabilities[:, 1] if probabilities.shape[1] == 2 else probabilities


def load_either(path: Path) -> Any:
    return load_xgboost(path) if path.suffix == ".json" else load_lightgbm(path)


@pytest.mark.parametrize("name", FILES)
def test_their_models_predict_the_same_here(tmp_path: Path, name: str) -> None:
    model = load_either(FOLDER / name)
    expected = json.loads((FOLDER / f"{Path(name).stem}.expected.json").read_text())
    np.testing.assert_allclose(predictions_of(model), expected["predictions"], rtol=1e-6)
    contributions = model.shap_values(ROWS).reshape(len(ROWS), -1)
    recorded = np.reshape(expected["contributions"], contributions.shape)
    np.testing.assert_allclose(contributions, recorded, atol=2e-6)
    model.save(tmp_path / "model")
    assert np.array_equal(predictions_of(load(tmp_path / "model")), predictions_of(model))


@pytest.mark.parametrize("name", FILES)
def test_their_models_can_be_written_again(tmp_path: Path, name: str) -> None:
    model = load_either(FOLDER / name)
    model.save_xgboost(tmp_path / "model.json")
    model.save_lightgbm(tmp_path / "model.txt")
    for other in (load_xgboost(tmp_path / "model.json"), load_lightgbm(tmp_path / "model.txt")):
        np.testing.assert_allclose(predictions_of(other), predictions_of(model), rtol=1e-6)


def ours(loss: str) -> Any:
    if loss in ("logistic", "softmax"):
        return GradientBoostingClassifier(**CATEGORICAL).fit(X, classes_of(Y, 2 + (loss == "softmax")))
    return GradientBoostingRegressor(loss, quantile=0.3 if loss == "quantile" else None, **CATEGORICAL).fit(
        X, Y
    )


LOSSES = ["squared_error", "quantile", "huber", "poisson", "gamma", "tweedie", "logistic", "softmax"]


@pytest.mark.parametrize("loss", LOSSES)
def test_our_files_give_the_same_model(tmp_path: Path, loss: str) -> None:
    model = ours(loss)
    model.save_lightgbm(tmp_path / "model.txt")
    model.save_xgboost(tmp_path / "model.json")
    other = load_lightgbm(tmp_path / "model.txt")
    np.testing.assert_allclose(predictions_of(other), predictions_of(model), rtol=1e-14)
    np.testing.assert_allclose(
        predictions_of(load_xgboost(tmp_path / "model.json")), predictions_of(model), rtol=1e-6
    )
    assert other.loss == model.loss


@pytest.mark.parametrize("loss", LOSSES)
def test_xgboost_predicts_the_same(tmp_path: Path, loss: str) -> None:
    xgboost = pytest.importorskip("xgboost", reason="XGBoost is not installed here")
    model = ours(loss)
    model.save_xgboost(tmp_path / "model.json")
    rows = xgboost.DMatrix(ROWS, enable_categorical=True, feature_types=["float", "float", "float", "c"])
    booster = xgboost.Booster(model_file=tmp_path / "model.json")
    np.testing.assert_allclose(booster.predict(rows), predictions_of(model), rtol=2e-6)
    contributions = booster.predict(rows, pred_contribs=True)
    np.testing.assert_allclose(contributions, model.shap_values(ROWS), atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_lightgbm_predicts_the_same(tmp_path: Path, loss: str) -> None:
    lightgbm = pytest.importorskip("lightgbm", reason="LightGBM is not installed here")
    model = ours(loss)
    model.save_lightgbm(tmp_path / "model.txt")
    booster = lightgbm.Booster(model_file=tmp_path / "model.txt")
    np.testing.assert_allclose(booster.predict(ROWS, num_threads=1), predictions_of(model), rtol=1e-12)


def test_categories_keep_their_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    names = np.array(["red", "green", "blue"])[np.arange(300) % 3]
    frame = pandas.DataFrame({"size": X[:, 0], "color": pandas.Categorical(names)})
    model = GradientBoostingRegressor(max_iter=5).fit(frame, X[:, 0] + (names == "red"))
    model.save_lightgbm(tmp_path / "model.txt")
    model.save_xgboost(tmp_path / "model.json")
    other = load_lightgbm(tmp_path / "model.txt")
    assert np.array_equal(other.predict(frame), model.predict(frame))
    assert other.feature_names_in_.tolist() == ["size", "color"]
    np.testing.assert_allclose(
        load_xgboost(tmp_path / "model.json").predict(frame), model.predict(frame), 1e-6
    )


def test_a_fit_goes_on_with_a_model_of_lightgbm() -> None:
    model = load_lightgbm(FOLDER / "lightgbm-regression.txt")
    before = np.square(model.predict(X) - Y).mean()
    model.set_params(warm_start=True, max_iter=30).fit(X, Y)
    assert model.n_iter_ == 30
    assert np.square(model.predict(X) - Y).mean() < before


def test_borders_above_all_numbers_stay(tmp_path: Path) -> None:
    data = np.array([[1.0], [2.0], [np.nan]]).repeat(50, axis=0)
    y = np.repeat([0.0, 0.0, 1.0], 50)
    model = GradientBoostingRegressor(max_iter=1, learning_rate=1.0, early_stopping=False).fit(data, y)
    model.save_lightgbm(tmp_path / "model.txt")
    for each in (model, load_lightgbm(tmp_path / "model.txt")):
        np.testing.assert_allclose(each.predict([[np.inf], [np.nan]]), [0, 1], atol=1e-9)


@pytest.mark.parametrize("save", ["save_xgboost", "save_lightgbm"])
def test_categories_of_other_libraries_are_whole_numbers(tmp_path: Path, save: str) -> None:
    data = np.repeat([[0.5], [1.0], [2.0]], 50, axis=0)
    model = GradientBoostingRegressor(max_iter=1, categorical_features=[0]).fit(data, data[:, 0])
    with pytest.raises(UsageError, match="column 0 has categories that are not whole numbers"):
        getattr(model, save)(tmp_path / "model")


def changed(name: str, old: str, new: str, path: Path) -> Path:
    text = (FOLDER / name).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "xgboost-reg-squarederror.json",
            "reg:squarederror",
            "survival:cox",
            "its objective is 'survival:cox'",
        ),
        ("xgboost-reg-squarederror.json", '"gbtree"', '"gblinear"', "its booster is 'gblinear'"),
        ("xgboost-reg-squarederror.json", '"left_children":[1', '"left_children":[0', "not those of a tree"),
        ("xgboost-reg-squarederror.json", '"left_children":[1', '"left_children":[999', "does not exist"),
        ("xgboost-reg-squarederror.json", '"tree_info"', '"tree"', "is not a model of XGBoost in JSON"),
        (
            "xgboost-multi-softprob.json",
            '"tree_info":[0,1,2',
            '"tree_info":[0,0,1',
            "several trees for each class",
        ),
        ("lightgbm-regression.txt", "objective=regression", "objective=cross_entropy", "'cross_entropy'"),
        ("lightgbm-regression.txt", "is_linear=0", "is_linear=1", "linear models"),
        ("lightgbm-regression.txt", "left_child=1", "left_child=0", "not those of a tree"),
        ("lightgbm-regression.txt", "split_feature=", "split_feature=77 ", "cannot be read|is not a model"),
        ("lightgbm-regression.txt", "tree\n", "forest\n", "does not begin with 'tree'"),
        ("lightgbm-regression.txt", "num_leaves=", "leaves=", "is not a model of LightGBM in text"),
        ("lightgbm-multiclass.txt", "_per_iteration=3", "_per_iteration=0", "or is damaged"),
        ("lightgbm-regression.txt", "num_leaves=", "leaf_count=\nnum_leaves=9999999", "numbers of leaves"),
        ("xgboost-reg-squarederror.json", '"num_feature":"', '"num_feature":"9999999', "expected at most"),
        ("xgboost-reg-squarederror.json", '"split_indices":[', '"split_indices":[-', "a split has no column"),
        ("xgboost-reg-squarederror.json", '"left_children":[1', '"left_children":[1.5', "cannot be read"),
    ],
)
def test_what_cannot_be_expressed_is_an_error(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_either(changed(name, old, new, tmp_path / f"model{Path(name).suffix}"))


def test_a_base_score_of_logitraw_is_a_score(tmp_path: Path) -> None:
    name, path = "xgboost-binary-logistic.json", tmp_path / "model.json"
    document = json.loads((FOLDER / name).read_text())
    document["learner"]["objective"]["name"] = "binary:logitraw"
    document["learner"]["learner_model_param"]["base_score"] = "[2.5E-1]"
    margins = load_xgboost(FOLDER / name).decision_function(ROWS) - load_xgboost(FOLDER / name).baseline_
    for version, base in (([3, 2, 0], 0.25), ([1, 7, 6], np.log(0.25 / 0.75))):
        path.write_text(json.dumps({**document, "version": version}))
        np.testing.assert_allclose(load_xgboost(path).decision_function(ROWS), margins + base, rtol=1e-12)


@pytest.mark.parametrize("save", ["save_xgboost", "save_lightgbm"])
def test_softmax_of_two_classes_is_read(tmp_path: Path, save: str) -> None:
    path = tmp_path / "model"
    model = ours("softmax")
    getattr(model, save)(path)
    scores = model.decision_function(ROWS)
    text = path.read_text()
    if save == "save_lightgbm":  # the trees of the third class are left out
        header, *trees = text.split("end of trees")[0].split("\nTree=")
        kept = [tree for number, tree in enumerate(trees) if number % 3 < 2]
        text = "\nTree=".join([header, *kept]).replace("iteration=3", "iteration=2")
    else:
        document = json.loads(text)
        learner = document["learner"]
        forest = learner["gradient_booster"]["model"]
        forest["trees"] = [tree for number, tree in enumerate(forest["trees"]) if number % 3 < 2]
        forest["tree_info"] = [0, 1] * (len(forest["trees"]) // 2)
        learner["learner_model_param"]["num_class"] = "2"
        text = json.dumps(document)
    path.write_text(text)
    read = load_xgboost(path) if save == "save_xgboost" else load_lightgbm(path)
    assert read.classes_.tolist() == [0, 1]
    np.testing.assert_allclose(read.decision_function(ROWS), scores[:, 1] - scores[:, 0], atol=2e-6)


def test_names_become_words_of_lightgbm(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a b", "", "c", "d"])
    GradientBoostingRegressor(max_iter=1).fit(frame, Y).save_lightgbm(tmp_path / "model.txt")
    names = load_lightgbm(tmp_path / "model.txt").feature_names_in_
    assert names.tolist() == ["a_b", "Column_1", "c", "d"]


def test_zeros_as_missing_values_are_an_error(tmp_path: Path) -> None:
    text = (FOLDER / "lightgbm-regression.txt").read_text()
    lines = [
        f"decision_type={' '.join('4' for _ in line.split())}" if line.startswith("decision_type") else line
        for line in text.replace("num_cat=1", "num_cat=0").split("\n")
    ]
    (tmp_path / "model.txt").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"zeros as missing values|numbers in one split"):
        load_lightgbm(tmp_path / "model.txt")


def test_too_many_borders_are_an_error(tmp_path: Path) -> None:
    model = GradientBoostingRegressor(max_iter=300, max_bins=255, min_samples_leaf=1, early_stopping=False)
    model.fit(X[:, :1], Y)
    model.save_lightgbm(tmp_path / "model.txt")
    assert np.array_equal(load_lightgbm(tmp_path / "model.txt").predict(X[:, :1]), model.predict(X[:, :1]))
    text = (tmp_path / "model.txt").read_text().split("\n")
    borders = {line for line in text if line.startswith("threshold=")}
    shifted = [
        "threshold="
        + " ".join(repr(float(each) + len(borders) * 1e-9 + place * 1e-7) for each in line[10:].split())
        if line.startswith("threshold=")
        else line
        for place, line in enumerate(text)
    ]
    (tmp_path / "model.txt").write_text("\n".join(shifted))
    with pytest.raises(
        UsageError, match=r"column 0 has \d+ borders between numbers, .* at most 254: train .* max_bin=254"
    ):
        load_lightgbm(tmp_path / "model.txt")
