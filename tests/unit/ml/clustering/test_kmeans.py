"""K-means against scikit-learn, in one thread and in several; processes are in tests/ranks/ml/test_kmeans.py."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn import cluster as sklearn_cluster
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import haversine_distances

import ronde.ml
from ronde.comqueue import AllReduce, IterativeComQueue
from ronde.errors import RemoteError
from ronde.ml import KMeans, MiniBatchKMeans
from ronde.ml.clustering import lloyd
from ronde.ml.clustering.kmeans import MOST_LABELS, keeps_labels
from ronde.ml.training_data import TrainingData

Array = NDArray[Any]


def some_points(rows: int = 3000, columns: int = 4, dtype: str = "f8") -> Array:
    random = np.random.default_rng(0)
    means = random.normal(scale=4, size=(6, columns))
    return (means[random.integers(6, size=rows)] + random.normal(size=(rows, columns))).astype(dtype)


def the_other_model(start: Array, **params: Any) -> Any:
    return sklearn_cluster.KMeans(len(start), init=start, n_init=1, algorithm="lloyd", **params)


# --- The same as scikit-learn's -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("f8", 1e-9), ("f4", 1e-4)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_equals_scikit_learns_from_the_same_start(dtype: str, tolerance: float, is_weighted: bool) -> None:
    X = some_points(dtype=dtype)
    weights = np.random.default_rng(1).uniform(size=len(X)) if is_weighted else None
    model = KMeans(7, init=X[:7], tol=0, on="threads:2").fit(X, sample_weight=weights)
    other = the_other_model(X[:7], tol=0).fit(X, sample_weight=weights)
    np.testing.assert_allclose(model.cluster_centers_, other.cluster_centers_, rtol=0, atol=tolerance)
    assert model.cluster_centers_.dtype == X.dtype
    assert model.n_iter_ == other.n_iter_
    assert model.labels_.tolist() == other.labels_.tolist() == model.predict(X).tolist()
    assert model.inertia_ == pytest.approx(other.inertia_, rel=tolerance)
    assert model.score(X, sample_weight=weights) == pytest.approx(-model.inertia_)
    np.testing.assert_allclose(model.transform(X), other.transform(X), atol=10 * tolerance)


def test_tol_and_max_iter_have_scikit_learns_meaning() -> None:
    X = some_points()
    for params in ({"tol": 1e-3}, {"tol": 1e-2}, {"max_iter": 3}):
        model = KMeans(9, init=X[:9], **params).fit(X)
        other = the_other_model(X[:9], **params).fit(X)
        assert model.n_iter_ == other.n_iter_
        assert model.labels_.tolist() == other.labels_.tolist() == model.predict(X).tolist()


def test_a_drawn_start_is_as_good_as_scikit_learns() -> None:
    X = some_points()
    other = sklearn_cluster.KMeans(6, n_init=5, random_state=0).fit(X)
    assert KMeans(6, n_init=5, random_state=0).fit(X).inertia_ <= other.inertia_ * 1.0001
    assert KMeans(6, init="random", random_state=0).fit(X).inertia_ <= other.inertia_ * 1.0001


# --- The classical case: iris, in all forms -------------------------------------------------------------------------


def assign(context: Any) -> None:
    """Put the sum matrix, as Alink has it: a row for each center, with the sums of its points and their number."""
    points, centers = context.get_obj("points"), context.get_obj("centers")
    nearest = ((points[:, None, :] - centers) ** 2).sum(axis=2).argmin(axis=1)
    context.put_obj("sums", np.eye(len(centers))[nearest].T @ np.c_[points, np.ones(len(points))])


def update(context: Any) -> None:
    sums = context.get_obj("sums")
    assert sums.shape == (3, 5)
    assert sums[:, -1].sum() == 150
    centers = sums[:, :-1] / sums[:, -1:]
    context.put_obj("moved", abs(centers - context.get_obj("centers")).max())
    context.put_obj("centers", centers)


def test_iris_as_a_queue_and_as_an_estimator() -> None:
    X = load_iris().data
    start = X[[0, 60, 120]]
    other = the_other_model(start, tol=0).fit(X)
    queue = IterativeComQueue().init_with_partitioned_data("points", X)
    queue.init_with_broadcast_data("centers", start).add(assign).add(AllReduce("sums")).add(update)
    queue.set_compare_criterion_of_node0(lambda context: context.get_obj("moved") < 1e-12).set_max_iter(50)
    centers = queue.close_with(lambda context: context.get_obj("centers")).exec("threads:2")[1]
    np.testing.assert_allclose(centers, other.cluster_centers_, rtol=0, atol=1e-9)
    model = KMeans(3, init=start, tol=0, on="threads:2").fit(X)
    np.testing.assert_allclose(model.cluster_centers_, other.cluster_centers_, rtol=0, atol=1e-9)
    assert model.labels_.tolist() == other.labels_.tolist()


# --- The same bits everywhere ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["k-means||", "random"])
def test_the_number_of_tasks_does_not_matter(init: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lloyd, "FEW_ROWS", 1000)  # draw candidates, as from many rows
    X = some_points()
    weights = np.random.default_rng(1).uniform(size=len(X))
    fits = [
        KMeans(9, init=init, n_init=2, random_state=3, on=f"threads:{tasks}").fit(X, sample_weight=weights)
        for tasks in (1, 2, 3, 4)
    ]
    for fit in fits:
        assert fit.cluster_centers_.tobytes() == fits[0].cluster_centers_.tobytes()
        assert fit.labels_.tobytes() == fits[0].labels_.tobytes()
        assert fit.inertia_ == fits[0].inertia_
        assert fit.history_ == fits[0].history_
    other = KMeans(9, init=init, n_init=2, random_state=4).fit(X, sample_weight=weights)
    assert other.history_ != fits[0].history_


def test_the_best_of_several_runs_counts() -> None:
    X = some_points()
    model = KMeans(8, init="random", n_init=4, random_state=0).fit(X)
    ends = [max(run, key=lambda record: record["step"]) for run in _runs(model.history_)]
    assert len(ends) == 4
    best = min(ends, key=lambda record: record["loss"])
    assert model.inertia_ == pytest.approx(best["loss"], rel=1e-3)
    assert model.inertia_ <= best["loss"]
    assert model.n_iter_ == len([record for record in model.history_ if record["run"] == best["run"]])


def _runs(history: Any) -> list[list[dict[str, float]]]:
    numbers = sorted({record["run"] for record in history})
    return [[record for record in history if record["run"] == number] for number in numbers]


# --- Empty clusters -------------------------------------------------------------------------------------------------


def test_empty_clusters_get_the_farthest_rows() -> None:
    X = np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [30.0]])
    start = np.array([[0.0], [100.0], [200.0]])
    for max_iter in (1, 10):
        model = KMeans(3, init=start, max_iter=max_iter, on="threads:2").fit(X)
        other = the_other_model(start, max_iter=max_iter).fit(X)
        np.testing.assert_allclose(model.cluster_centers_, other.cluster_centers_, atol=1e-9)
        assert model.labels_.tolist() == other.labels_.tolist()


def test_several_empty_clusters_get_different_rows() -> None:
    X = np.array([[0.0], [1.0], [5.0], [20.0], [21.0], [22.0]])
    model = KMeans(4, init=np.array([[0.0], [50.0], [60.0], [70.0]]), on="threads:3").fit(
        X, sample_weight=[1, 1, 1, 1, 1, 0]
    )
    assert len(set(model.labels_)) == 4
    assert sorted(model.cluster_centers_.ravel()) == [0.5, 5, 20, 21]  # the row without weight moves none


def test_fewer_distinct_points_than_clusters() -> None:
    X = np.repeat([[0.0, 0], [1, 1], [5, 5]], 20, axis=0)
    for init in ("k-means||", "random", X[:5]):
        with pytest.warns(
            ConvergenceWarning, match=r"distinct clusters \(3\) found smaller than n_clusters \(5\)"
        ):
            model = KMeans(5, init=init, random_state=0).fit(X)
        assert model.inertia_ == 0


# --- Metrics --------------------------------------------------------------------------------------------------------


def test_cosine_clusters_directions() -> None:
    random = np.random.default_rng(0)
    X = np.repeat(np.eye(3), 50, axis=0) * random.uniform(0.1, 50, size=(150, 1)) + random.normal(
        scale=0.01, size=(150, 3)
    )
    model = KMeans(3, metric="cosine", random_state=0, on="threads:2").fit(X)
    np.testing.assert_allclose(np.linalg.norm(model.cluster_centers_, axis=1), 1)
    assert sorted(np.bincount(model.labels_)) == [50, 50, 50]
    distances = model.transform(X)
    assert model.labels_.tolist() == distances.argmin(axis=1).tolist() == model.predict(7 * X).tolist()
    assert model.inertia_ == pytest.approx(distances.min(axis=1).sum())
    with pytest.raises(ValueError, match="row 2 of these 3 consists of zeros"):
        KMeans(2, metric="cosine").fit([[1, 1], [1, 2], [0, 0]])


def test_haversine_clusters_across_the_date_line() -> None:
    degrees = np.array([[0, 179], [1, -179], [-1, 180], [50, 10], [52, 12], [51, 11.0]])
    model = KMeans(2, metric="haversine", random_state=0).fit(np.radians(degrees))
    assert model.labels_[:3].tolist() in ([0] * 3, [1] * 3)
    across = np.degrees(model.cluster_centers_[model.labels_[0]])
    assert across[0] == pytest.approx(0, abs=0.01)
    assert abs(across[1]) == pytest.approx(180, abs=0.01)
    angles = haversine_distances(np.radians(degrees), model.cluster_centers_)
    assert model.inertia_ == pytest.approx((np.sin(angles.min(axis=1) / 2) ** 2).sum())
    with pytest.raises(ValueError, match="needs 2: latitude and longitude"):
        KMeans(2, metric="haversine").fit(np.eye(3))
    with pytest.raises(
        ValueError, match=r"row 1 of these 2 has the latitude 52\.5: expected radians.*numpy.radians"
    ):
        KMeans(2, metric="haversine", on="threads:1").fit(np.array([[1.5, 8.0], [52.5, 13.4]]))
    north_pole = np.array([[np.pi / 2, 0], [0, 0]], np.float32)
    assert len(KMeans(2, metric="haversine").fit(north_pole).cluster_centers_) == 2


# --- Weights and rows that a task reads -----------------------------------------------------------------------------


def test_weights_count_as_repetitions() -> None:
    X = some_points(200)
    weights = np.random.default_rng(0).integers(0, 4, size=len(X))
    weighted = KMeans(4, random_state=0).fit(X, sample_weight=weights)
    repeated = KMeans(4, random_state=0).fit(np.repeat(X, weights, axis=0))
    np.testing.assert_allclose(weighted.cluster_centers_, repeated.cluster_centers_, atol=1e-9)
    assert weighted.inertia_ == pytest.approx(repeated.inertia_)


class Source:
    """Rows that are read block by block in every step."""

    in_memory = False

    def __init__(self, rows: Array) -> None:
        self._rows, self.num_rows = rows, len(rows)

    def load(self, begin: int, end: int) -> Array:
        return self._rows[begin:end]


def test_rows_that_tasks_read() -> None:
    X = some_points()
    weights = np.random.default_rng(0).uniform(size=len(X))
    model = KMeans(5, random_state=0, on="threads:2").fit(Source(X), sample_weight=weights)
    same = KMeans(5, random_state=0).fit(X, sample_weight=weights)
    assert model.cluster_centers_.tobytes() == same.cluster_centers_.tobytes()
    assert model.labels_.tolist() == same.labels_.tolist() == model.predict(Source(X)).tolist()
    assert model.score(Source(X), sample_weight=weights) == pytest.approx(-same.inertia_)
    X[2000, 1] = np.nan
    for init in ("k-means||", X[:5]):
        with pytest.raises(RemoteError, match="contains NaN"):
            KMeans(5, init=init, random_state=0, on="threads:2").fit(Source(X))
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        model.predict(Source(X))


def test_labels_of_files_are_kept_up_to_a_number_of_rows() -> None:
    source = Source(some_points(10))

    def keeps(rows: Any, num_rows: int) -> bool:
        return keeps_labels(TrainingData({"X": rows}, num_rows, 2, np.dtype(float), float(num_rows)))

    assert keeps(source, MOST_LABELS)
    assert not keeps(source, MOST_LABELS + 1)
    assert keeps(np.empty((0, 2)), MOST_LABELS + 1)  # whose caller has room for as many labels as rows


# --- Errors, and what else an estimator does ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "X", "message"),
    [
        ({"n_clusters": 3}, np.eye(2), "n_samples=2 should be >= n_clusters=3"),
        ({"n_clusters": 1}, [[np.nan, 1]], "contains NaN"),
        ({"n_clusters": 2, "init": np.eye(3)}, np.eye(3), r"init has the shape \(3, 3\): expected \(2, 3\)"),
        ({"n_clusters": 0}, np.eye(3), "'n_clusters' parameter"),
        ({"init": "farthest"}, np.eye(3), "'init' parameter"),
        ({"metric": "manhattan"}, np.eye(3), "'metric' parameter"),
    ],
)
def test_invalid_arguments(params: dict[str, Any], X: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KMeans(**params).fit(X)


def test_several_runs_from_one_start_are_one() -> None:
    with pytest.warns(
        RuntimeWarning, match="only one init in KMeans instead of n_init=3, which has no effect"
    ):
        model = KMeans(2, init=np.eye(2, 3), n_init=3).fit(np.eye(3))
    assert {record["run"] for record in model.history_} == {1}


def test_a_function_chooses_the_first_centers_of_each_run() -> None:
    X, starts = some_points(200), []

    def chosen(rows: Array, n_clusters: int, random_state: np.random.RandomState) -> Array:
        starts.append(rows[random_state.permutation(len(rows))[:n_clusters]])
        return starts[-1]

    model = KMeans(4, init=chosen, n_init=3, random_state=0, on="threads:2").fit(X)
    assert len(starts) == 3
    best = min(KMeans(4, init=start).fit(X).inertia_ for start in starts)
    assert model.inertia_ == pytest.approx(best)
    KMeans(4, init=chosen, random_state=0, max_iter=1).fit(X)
    assert len(starts) == 3 + 10
    np.testing.assert_array_equal(starts[3], starts[0])
    with pytest.raises(ValueError, match=r"the result of init has the shape \(1, 4\): expected \(4, 4\)"):
        KMeans(4, init=lambda rows, n_clusters, random_state: rows[:1]).fit(X)
    with pytest.raises(ValueError, match=r"init is a function, which gets all rows as an array"):
        KMeans(4, init=chosen).fit(Source(X))


@pytest.mark.parametrize("rows", [500, 9000])  # all rows are candidates; each center takes a pass
def test_kmeans_plus_plus_finds_all_groups_with_any_number_of_tasks(rows: int) -> None:
    means = np.stack(np.meshgrid(np.arange(4), np.arange(5)), axis=-1).reshape(-1, 2) * 1000.0
    X = means[np.arange(rows) % len(means)] + np.random.default_rng(0).normal(size=(rows, 2))
    models = [KMeans(20, init="k-means++", random_state=7, on=f"threads:{n}").fit(X) for n in (1, 2, 3, 4)]
    assert models[0].inertia_ < 3 * rows
    assert len({model.cluster_centers_.tobytes() for model in models}) == 1
    weights = (np.arange(rows) % len(means) < 10).astype(float)
    some = KMeans(20, init="k-means++", random_state=7, max_iter=1).fit(X, sample_weight=weights)
    assert (some.cluster_centers_[:, 1] < 2500).all()  # rows without weight are drawn by no center


def test_more_centers_by_kmeans_plus_plus_than_distinct_rows() -> None:
    X = np.repeat(np.eye(3), 3000, axis=0)
    with pytest.warns(ConvergenceWarning, match=r"distinct clusters \(3\)"):
        model = KMeans(5, init="k-means++", random_state=0).fit(X)
    assert model.inertia_ == 0


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model = KMeans(3, random_state=0, verbose=1).fit(some_points(100))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(model.history_) == model.n_iter_
    assert lines[0].startswith("KMeans: step 1, loss ")


def test_a_saved_model_predicts_the_same(tmp_path: Path) -> None:
    X = some_points(500)
    model = KMeans(3, random_state=0, on="threads:2").fit(X)
    model.save(tmp_path / "model.ronde")
    loaded = ronde.ml.load(tmp_path / "model.ronde")
    assert loaded.predict(X).tolist() == model.labels_.tolist()
    assert loaded.inertia_ == model.inertia_
    assert loaded.history_ == model.history_
    assert loaded.get_feature_names_out().tolist() == ["kmeans0", "kmeans1", "kmeans2"]


def test_no_warning_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KMeans(3, random_state=0).fit_predict(some_points(100))


def test_tasks_in_other_processes_need_not_import_scikit_learn() -> None:
    modules = "ronde.ml.tasks, ronde.ml.clustering.lloyd, ronde.ml.clustering.mini_batches"
    subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; assert 'sklearn' not in sys.modules"], check=True
    )


@pytest.mark.parametrize("estimator", [KMeans, MiniBatchKMeans])
@pytest.mark.parametrize("init", ["k-means||", "random", "array"])
def test_float32_rows_far_from_0_get_the_clusters_of_float64_rows(estimator: Any, init: str) -> None:
    X = (np.random.default_rng(0).normal(size=(2000, 5)) + [1e4, 0, -1e3, 1, 1e3]).astype(np.float32)
    start: Any = X[:10] if init == "array" else init
    wide, narrow = (
        estimator(10, init=start, random_state=0, on="threads:2").fit(X.astype(dtype)) for dtype in "df"
    )
    assert narrow.n_iter_ == wide.n_iter_
    assert narrow.inertia_ == pytest.approx(wide.inertia_, rel=1e-5)
    assert np.mean(narrow.labels_ != wide.labels_) < 1e-3  # centers are rounded to float32 in the end
    assert narrow.cluster_centers_.dtype == np.float32
    np.testing.assert_allclose(narrow.cluster_centers_, wide.cluster_centers_, atol=2e-3)
    assert narrow.labels_.tolist() == narrow.predict(X).tolist()
    assert narrow.score(X) == pytest.approx(-narrow.inertia_, rel=1e-6)


def test_float32_rows_of_files_are_shifted_alike() -> None:
    class Source:
        in_memory = False

        def __init__(self, X: Any) -> None:
            self.num_rows, self._X = len(X), X

        def load(self, begin: int, end: int) -> Any:
            return self._X[begin:end]

    X = (np.random.default_rng(0).normal(size=(900, 3)) + 1e4).astype(np.float32)
    models = [KMeans(4, random_state=0, on="threads:2").fit(rows) for rows in (X, Source(X))]
    assert models[0].cluster_centers_.tobytes() == models[1].cluster_centers_.tobytes()


@pytest.mark.parametrize("estimator", [KMeans, MiniBatchKMeans])
def test_errors_about_first_centers_have_the_words_of_scikit_learn(estimator: Any) -> None:
    X = np.eye(6, 3)
    for start, what in ((X[:1], "clusters"), (X[:2, :2], "features of the data")):
        with pytest.raises(
            ValueError, match=f"The shape of the initial centers .* does not match the number of {what}"
        ):
            estimator(2, init=start, on="threads:1").fit(X)
    with pytest.warns(
        RuntimeWarning, match="Explicit initial center position passed: performing only one init"
    ):
        estimator(2, init=X[:2], n_init=3, on="threads:1").fit(X)
