from __future__ import annotations

import io
import json
import os
import random
import resource
import sys
import types
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.lib import format as npy

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn import config_context

from ronde import ml
from ronde.errors import UsageError
from ronde.ml import ESTIMATORS, KMeans, load
from ronde.ml.base import DistributedEstimator
from ronde.ml.history import History

EXAMPLE_ATTRIBUTES = [
    *("coef_", "classes_", "feature_names_in_", "n_iter_", "loss_", "is_done_", "mixed_", "history_", "a_")
]


class AnyForm:
    """Of attributes that may be anything."""

    is_needed = False

    def problem(self, value: Any, sizes: dict[str, int]) -> None:
        return None


class Example(DistributedEstimator):
    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "alpha": [float],
        "weights": [dict, None],
    }
    _fitted_forms: ClassVar = {name: AnyForm() for name in EXAMPLE_ATTRIBUTES}

    def __init__(self, alpha: Any = 1.0, weights: Any = None, on: Any = None, verbose: int = 0) -> None:
        self.alpha, self.weights, self.on, self.verbose = alpha, weights, on, verbose


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("example_of_a_saved_estimator")
    module.Example = Example  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ESTIMATORS, "Example", module.__name__)


def saved(path: Path, description: Any, arrays: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    """A file as a stranger might make it."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("estimator.json", json.dumps(description))
        for name, data in (arrays or {}).items():
            archive.writestr(f"arrays/{name}.npy", data)
    return path


def description(**attributes: Any) -> dict[str, Any]:
    return {"format": 2, "class": "Example", "params": {}, "attributes": attributes}


def npy_file(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    npy.write_array(file, array, version=(1, 0))
    return file.getvalue()


def test_a_loaded_estimator_is_the_saved_one(tmp_path: Path) -> None:
    model = Example(alpha=float("inf"), weights={1: 0.5, "b": 2}, on="local:2")
    values: dict[str, Any] = {
        "coef_": np.arange(6.0).reshape(2, 3).T,
        "classes_": np.array(["a", "b"]),
        "feature_names_in_": np.array(["x", "y"], dtype=object),
        "n_iter_": np.int64(3),
        "loss_": np.float32(0.1),
        "is_done_": True,
        "mixed_": [None, (1, 2.5), {"k": np.array([True])}],
        "history_": History([{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}]),
    }
    for name, value in {**values, "_private": object()}.items():
        setattr(model, name, value)
    model.save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert other.get_params() == {**model.get_params(), "on": None}
    assert vars(other).keys() == vars(model).keys() - {"_private"}
    for name, value in values.items():
        assert repr(vars(other)[name]) == repr(value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert other.coef_.flags.writeable


def test_outputs_and_metadata_requests_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed here")
    with config_context(enable_metadata_routing=True):
        model = KMeans(2).set_output(transform="pandas").set_fit_request(sample_weight="weight")
        model.set_score_request(sample_weight=True)
    model.fit(np.eye(4)).save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert type(other.transform(np.eye(4))).__name__ == "DataFrame"
    assert repr(other.get_metadata_routing()) == repr(model.get_metadata_routing())
    assert other.get_metadata_routing().fit.requests == {"sample_weight": "weight"}
    other.set_output(transform="default").save(tmp_path / "model")
    assert type(load(tmp_path / "model").transform(np.eye(4))) is np.ndarray


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "__import__"}, "its output is '__import__': expected one of default, pandas"),
        ({"output": ["pandas"]}, "its output is"),
        ({"metadata_requests": {"fit": {"beta": True}}}, "KMeans takes no metadata 'beta' in 'fit'"),
        (
            {"metadata_requests": {"save": {"sample_weight": True}}},
            "takes no metadata 'sample_weight' in 'save'",
        ),
        ({"metadata_requests": {"fit": {"sample_weight": "a b"}}}, "damaged"),
        ({"metadata_requests": {"fit": {"sample_weight": []}}}, "damaged"),
        ({"metadata_requests": 1}, "damaged"),
    ],
)
def test_settings_that_save_does_not_write_are_refused(tmp_path: Path, settings: Any, message: str) -> None:
    path = saved(tmp_path / "model", {**description(), "class": "KMeans", **settings})
    with pytest.raises(UsageError, match=message):
        load(path)


def test_a_value_without_a_plain_form_is_not_saved(tmp_path: Path) -> None:
    model = Example(weights=np.random.RandomState(0))
    with pytest.raises(UsageError, match=r"Example\.weights is of type RandomState"):
        model.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "its format is 3.*newer"),
        ({"class": "os.system"}, "its class is 'os.system': expected one of"),
        ({"params": {"beta": 1}}, "beta"),
        ({"params": {"alpha": "x"}}, "alpha"),
        ({"attributes": {"__class__": 1}}, "'__class__' is not the name of a fitted attribute"),
        ({"attributes": {"save": 1}}, "'save' is not"),
        ({"attributes": {"a_": {"pickle": ""}}}, "unknown kind of value: 'pickle'"),
        ({"attributes": {"a_": {"array": 7}}}, "7 is not the number of an array"),
        (
            {"attributes": {"a_": [{"array": 0}, {"array": 0}]}},
            "0 is not the number of an array, or is there twice",
        ),
        ({"attributes": {"a_": {"array": "../x"}}}, "'../x' is not the number"),
        ({"attributes": []}, "is not a saved estimator, or is damaged"),
    ],
)
def test_a_file_that_save_does_not_write_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    path = saved(tmp_path / "model", {**description(), **changes}, {"0": npy_file(np.zeros(2))})
    with pytest.raises(UsageError, match=message):
        load(path)


def hostile_header(shape: str, descr: str = "'<f8'") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


@pytest.mark.parametrize(
    "array",
    [
        hostile_header("(1000000000000,)"),
        hostile_header("(-1,)"),
        hostile_header("(1000000000000,)", "'<U0'"),
        hostile_header("(1,)", "'|O'"),
        hostile_header("(1,)", "[('a', '|O')]"),
        hostile_header("(0,)", "'" + "9" * 5000 + "'"),
        b"\x93NUMPY\x03\x00",
        b"",
        npy_file(np.zeros(3))[:-1],
    ],
)
def test_a_hostile_array_is_refused(tmp_path: Path, array: bytes) -> None:
    path = saved(tmp_path / "model", description(coef_={"array": 0}), {"0": array})
    with pytest.raises(UsageError, match="damaged or incomplete"):
        load(path)


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    bomb = npy_file(np.zeros(10_000_000))
    path = saved(tmp_path / "model", description(coef_={"array": 0}), {"0": bomb}, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        load(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    model = Example()
    model.coef_ = np.zeros(100)
    model.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "part").write_bytes(data[:size])
        with pytest.raises(UsageError, match=r"part .*damaged or incomplete"):
            load(tmp_path / "part")
    damaged = bytearray(data)
    damaged[data.index(b"NUMPY") + 200] ^= 1
    (tmp_path / "part").write_bytes(damaged)
    with pytest.raises(UsageError, match="CRC"):
        load(tmp_path / "part")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


# Files of strangers


Changes = dict[str, Any]


def repacked(path: Path, changes: Changes, params: Changes | None = None) -> Path:
    """The file of an estimator with other attributes: an array, or JSON; `...`: without this one."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    found = json.loads(content.pop("estimator.json"))
    found["params"] |= params or {}
    for name, value in changes.items():
        if value is ...:
            del found["attributes"][name]
        elif isinstance(value, np.ndarray):
            content[f"arrays/{len(content)}.npy"] = npy_file(value)
            found["attributes"][name] = {"array": len(content) - 1}
        else:
            found["attributes"][name] = value
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("estimator.json", json.dumps(found))
        for name, data in content.items():
            archive.writestr(name, data)
    return path


X = np.random.default_rng(0).normal(size=(40, 3))
TWO, THREE = np.arange(40) % 2, np.array(["a", "b", "c"])[np.arange(40) % 3]


def fitted(name: str, y: Any = TWO) -> Any:
    return getattr(ml, name)().set_params(on="threads:1").fit(X, y)


FORESTS = ["ExtraTreesClassifier", "RandomForestClassifier"]
CLASSIFIERS = ["GradientBoostingClassifier", "LinearSVC", "LogisticRegression", "Perceptron", *FORESTS]
REGRESSORS = ["ElasticNet", "Lasso", "LinearRegression", "Ridge"]
TARGETS = [
    *((name, TWO) for name in ("ExtraTreesRegressor", "GradientBoostingRegressor", "RandomForestRegressor")),
    *((name, y) for name in ("KMeans", "MiniBatchKMeans", *CLASSIFIERS) for y in (TWO, THREE)),
    *((name, y) for name in REGRESSORS for y in (TWO, TWO[:, None], np.stack([TWO, -TWO], axis=1))),
]


def test_each_estimator_is_tried() -> None:
    assert {name for name, _ in TARGETS} == ESTIMATORS.keys() - {
        "Example",
        "LatentDirichletAllocation",
    }  # see tests/unit/ml/topics


@pytest.mark.parametrize(("name", "y"), TARGETS, ids=lambda each: each if isinstance(each, str) else "y")
def test_what_a_fit_sets_can_be_loaded(tmp_path: Path, name: str, y: Any) -> None:
    model = fitted(name, y)
    model.save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert np.array_equal(other.predict(X), model.predict(X))
    assert other.history_ == model.history_
    assert vars(other).keys() == vars(model).keys()


@pytest.mark.parametrize("name", ["MiniBatchKMeans", "Perceptron"])
def test_what_a_partial_fit_sets_can_be_loaded(tmp_path: Path, name: str) -> None:
    model, further = getattr(ml, name)(), {} if name == "MiniBatchKMeans" else {"classes": [0, 1]}
    model.partial_fit(X, TWO, **further).save(tmp_path / "model")
    other = load(tmp_path / "model").partial_fit(X, TWO)
    assert np.array_equal(other.predict(X), model.partial_fit(X, TWO).predict(X))


KMEANS, RIDGE, LOGISTIC = "KMeans", "Ridge", "LogisticRegression"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (KMEANS, {"cluster_centers_": np.zeros((3, 3, 3))}, "cluster_centers_ has 3 dimensions: expected 2"),
        (KMEANS, {"cluster_centers_": np.zeros(3)}, "cluster_centers_ has 1 dimensions: expected 2"),
        (KMEANS, {"cluster_centers_": np.array(1.0)}, "cluster_centers_ has 0 dimensions: expected 2"),
        (KMEANS, {"cluster_centers_": np.zeros((0, 3))}, r"the shape \(0, 3\): expected some clusters"),
        (KMEANS, {"cluster_centers_": np.zeros((3, 2))}, "with 2 features: expected 3"),
        (
            KMEANS,
            {"cluster_centers_": np.zeros((3, 3), int)},
            "an array of int64: expected float32 or float64",
        ),
        (KMEANS, {"cluster_centers_": np.zeros((3, 3), "f2")}, "an array of float16: expected float32"),
        (KMEANS, {"cluster_centers_": np.array([["a"] * 3])}, "an array of str: expected float32"),
        (
            KMEANS,
            {"cluster_centers_": [[0.0, 0.0, 0.0]]},
            "cluster_centers_ is of type list: expected an array",
        ),
        (KMEANS, {"cluster_centers_": 1.5}, "cluster_centers_ is of type float: expected an array"),
        (KMEANS, {"cluster_centers_": ...}, "cluster_centers_ is missing"),
        (KMEANS, {"n_features_in_": "3"}, "n_features_in_ is of type str: expected a whole number"),
        (KMEANS, {"n_features_in_": 10**100}, "n_features_in_ is a number out of range"),
        (KMEANS, {"n_features_in_": True}, "n_features_in_ is of type bool"),
        (KMEANS, {"labels_": np.zeros(40)}, "labels_ is an array of float64: expected int32"),
        (KMEANS, {"history_": []}, "history_ is of type list: expected a History"),
        (KMEANS, {"history_": {"history": {"loss": "x"}}}, "damaged"),
        (KMEANS, {"feature_names_in_": {"texts": ["a", "b"]}}, "with 2 features: expected 3"),
        (KMEANS, {"feature_names_in_": {"texts": [1, 2, 3]}}, "an array of texts contains something else"),
        (KMEANS, {"coef_": np.zeros(3)}, "'coef_' is not the name of a fitted attribute of KMeans"),
        ("MiniBatchKMeans", {"counts_": np.zeros(3)}, "with 3 clusters: expected 8"),
        ("MiniBatchKMeans", {"n_steps_": 1.5}, "n_steps_ is of type float: expected a whole number"),
        (RIDGE, {"coef_": np.zeros((2, 2, 3))}, "coef_ has 3 dimensions: expected 2"),
        (RIDGE, {"intercept_": np.zeros(7)}, r"intercept_ has the shape \(7,\), with 7 outputs: expected 1"),
        (RIDGE, {"intercept_": "x"}, "intercept_ is of type str: expected an array"),
        (RIDGE, {"coef_": ...}, "coef_ is missing"),
        (LOGISTIC, {"classes_": np.zeros(1)}, r"classes_ is an array of shape \(1,\): expected"),
        (LOGISTIC, {"classes_": np.arange(3)}, "with 1 planes: expected 3"),
        (LOGISTIC, {"coef_": np.zeros(3)}, "coef_ has 1 dimensions: expected 2"),
        (LOGISTIC, {"intercept_": np.zeros(2)}, "with 2 planes: expected 1"),
    ],
)
def test_attributes_that_no_fit_sets_are_refused(
    tmp_path: Path, name: str, changes: Changes, message: str
) -> None:
    fitted(name).save(tmp_path / "model")
    with pytest.raises(UsageError, match=rf"{tmp_path}/model .*{message}"):
        load(repacked(tmp_path / "model", changes))


def test_arrays_of_another_byte_order_get_that_of_this_machine(tmp_path: Path) -> None:
    model = fitted(KMEANS)
    model.save(tmp_path / "model")
    other = load(repacked(tmp_path / "model", {"cluster_centers_": model.cluster_centers_.astype(">f8")}))
    assert other.cluster_centers_.dtype.isnative
    assert np.array_equal(other.predict(X), model.labels_)


def test_a_file_does_not_choose_where_the_next_fit_runs(tmp_path: Path) -> None:
    fitted(RIDGE).save(tmp_path / "model")
    with pytest.raises(UsageError, match="it sets on, which `save` never writes"):
        load(repacked(tmp_path / "model", {}, {"on": "spark:4"}))


def test_an_attribute_that_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model = fitted(RIDGE)
    model.note_ = "mine"
    with pytest.raises(
        UsageError, match="Ridge cannot be saved: 'note_' is not the name of a fitted attribute"
    ):
        model.save(tmp_path / "model")


def test_a_long_history_can_be_saved(tmp_path: Path) -> None:
    model = fitted(KMEANS)
    model.history_ = History([{"step": 1, "loss": 0.5, "moved": 0.25, "run": 1}] * 300_000)
    model.save(tmp_path / "model")
    assert load(tmp_path / "model").history_ == model.history_


@pytest.mark.parametrize("value", ["[]", "{}", '"ab"', "0.5"])
def test_a_small_file_does_not_take_much_memory(tmp_path: Path, value: str) -> None:
    text = json.dumps({**description(a_=["values"]), "class": KMEANS})
    path = tmp_path / "model"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("estimator.json", text.replace('"values"', ",".join([value] * 3_000_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match="consists of more than 500000 values"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5 * os.path.getsize(path) // 1024


def test_a_file_with_a_large_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(1100):
            archive.writestr(str(number), b"")
    data = path.read_bytes()
    with pytest.raises(UsageError, match="it has 1100 members, and at most 1000"):
        load(path)
    for field in (-12, -14):  # the number of members, on all disks and on this one
        data = data[:field] + (10).to_bytes(2, "little") + data[field + 2 :]
    path.write_bytes(data[:-10] + (300_000).to_bytes(4, "little") + data[-6:])
    with pytest.raises(UsageError, match="the directory of its members has 300000 bytes"):
        load(path)


@pytest.mark.parametrize("name", [KMEANS, RIDGE, LOGISTIC])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_give_a_model_that_predicts_or_a_usage_error(
    tmp_path: Path, name: str, seed: int
) -> None:
    """Bytes anywhere, or in the directory at the end; half of the files get right checksums, as of a stranger."""
    model = fitted(name)
    model.save(tmp_path / "model")
    whole, draw = (tmp_path / "model").read_bytes(), random.Random(seed)
    for number in range(200):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(data)) if number % 2 else -draw.randrange(1, 200)
            data[place] = draw.randrange(256)
        path = tmp_path / "damaged"
        path.write_bytes(with_right_checksums(data) if number % 4 > 1 else data)
        try:
            predicted, said = load(path).predict(X), str(path)
        except UsageError as error:
            predicted, said = X, str(error)
        assert (len(predicted), str(path) in said) == (len(X), True), f"seed {seed}, file {number}"


def with_right_checksums(data: bytearray) -> bytes:
    """The file, with checksums that fit the damaged content, if it still is an archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            content = {}
            for member in archive.infolist():
                start = member.header_offset + 30 + len(member.filename)
                extra = int.from_bytes(data[start - 2 - len(member.filename) :][:2], "little")
                content[member.filename] = bytes(data[start + extra :][: member.file_size])
    except Exception:
        return bytes(data)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, each in content.items():
            archive.writestr(name, each)
    return file.getvalue()
