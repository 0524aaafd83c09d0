from __future__ import annotations

import io
import json
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

from ronde.errors import UsageError
from ronde.ml import ESTIMATORS, KMeans, load
from ronde.ml.base import DistributedEstimator
from ronde.ml.history import History


class Example(DistributedEstimator):
    _parameter_constraints: ClassVar = {
        **DistributedEstimator._parameter_constraints,
        "alpha": [float],
        "weights": [dict, None],
    }

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
    return {"format": 1, "class": "Example", "params": {}, "attributes": attributes}


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
        ({"format": 2}, "its format is 2.*newer"),
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
        with pytest.raises(UsageError, match="damaged or incomplete"):
            load(tmp_path / "part")
    damaged = bytearray(data)
    damaged[data.index(b"NUMPY") + 200] ^= 1
    (tmp_path / "part").write_bytes(damaged)
    with pytest.raises(UsageError, match="CRC"):
        load(tmp_path / "part")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
