"""K-means with mini-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import ronde.ml
from ronde.ml import KMeans, MiniBatchKMeans

Array = NDArray[Any]


def some_points(rows: int = 6000) -> Array:
    random = np.random.default_rng(0)
    return random.normal(scale=5, size=(6, 4))[random.integers(6, size=rows)] + random.normal(size=(rows, 4))


def test_centers_are_nearly_as_good_as_those_of_all_rows() -> None:
    X = some_points()
    model = MiniBatchKMeans(6, batch_size=500, random_state=0).fit(X)
    best = KMeans(6, random_state=0, n_init=3).fit(X)
    assert model.inertia_ == pytest.approx(best.inertia_, rel=0.02)
    assert model.labels_.tolist() == model.predict(X).tolist()
    assert model.n_steps_ == len(model.history_)
    assert model.counts_.sum() == pytest.approx(500 * model.n_steps_)


@pytest.mark.parametrize("init", ["k-means||", "random"])
def test_the_number_of_tasks_does_not_matter(init: str) -> None:
    X = some_points()
    weights = np.random.default_rng(1).uniform(size=len(X))
    fits = [
        MiniBatchKMeans(6, init=init, batch_size=300, random_state=3, on=f"threads:{tasks}").fit(
            X, sample_weight=weights
        )
        for tasks in (1, 2, 3, 4)
    ]
    for fit in fits:
        assert fit.cluster_centers_.tobytes() == fits[0].cluster_centers_.tobytes()
        assert fit.labels_.tobytes() == fits[0].labels_.tobytes()
        assert fit.inertia_ == fits[0].inertia_
        assert fit.history_ == fits[0].history_


def test_one_batch_of_all_rows_is_a_step_of_kmeans() -> None:
    X = some_points(500)
    start = X[:6]
    batch = MiniBatchKMeans(6, init=start, batch_size=500, max_iter=1, reassignment_ratio=0).fit(X)
    whole = KMeans(6, init=start, max_iter=1).fit(X)
    np.testing.assert_allclose(batch.cluster_centers_, whole.cluster_centers_, rtol=1e-12)


def test_an_end_by_tol_or_by_patience_or_by_max_iter() -> None:
    X = some_points(2000)
    params: dict[str, Any] = dict(n_clusters=6, batch_size=200, random_state=0)
    assert MiniBatchKMeans(**params, max_no_improvement=None, max_iter=3).fit(X).n_steps_ == 30
    by_tol = MiniBatchKMeans(**params, max_no_improvement=None, tol=1e-2).fit(X)
    assert 1 <= by_tol.n_steps_ < 100
    assert by_tol.history_[-1]["moved"] < by_tol.history_[0]["moved"]
    assert 3 < MiniBatchKMeans(**params, max_no_improvement=3).fit(X).n_steps_ < 300


def test_no_more_rows_are_read_than_max_iter_allows() -> None:
    model = MiniBatchKMeans(3, batch_size=30, max_iter=10, max_no_improvement=None, random_state=0)
    model.fit(some_points(100))
    assert (model.n_steps_, model.n_iter_) == (33, 10)  # a 34th batch would read 1,020 rows


def test_rows_come_little_by_little() -> None:
    X = some_points()
    model = MiniBatchKMeans(6, init=X[[0, 1, 2, 3, 5, 17]])  # one row of each cluster
    for begin in range(0, len(X), 500):
        model.partial_fit(X[begin : begin + 500])
    assert -model.score(X) == pytest.approx(KMeans(6, random_state=0, n_init=3).fit(X).inertia_, rel=0.02)
    assert model.n_steps_ == 12
    assert model.counts_.sum() == pytest.approx(len(X))
    with pytest.raises(ValueError, match="n_samples=5 should be >= n_clusters=6"):
        MiniBatchKMeans(6).partial_fit(X[:5])


def test_a_cluster_without_rows_gets_the_farthest_row_of_the_batch() -> None:
    X = np.array([[0.0], [1.0], [9.0], [10.0], [30.0]])
    model = MiniBatchKMeans(3, init=np.array([[0.0], [10.0], [900.0]])).partial_fit(X)
    assert model.cluster_centers_.ravel().tolist() == [0.5, 49 / 3, 30]
    assert model.labels_.tolist() == [0, 0, 1, 1, 2]
    cosine = MiniBatchKMeans(2, metric="cosine", random_state=0).fit([[1, 0], [2, 0.1], [0, 3], [0, 1.0]])
    assert cosine.labels_[0] == cosine.labels_[1] != cosine.labels_[2] == cosine.labels_[3]
    np.testing.assert_allclose(np.linalg.norm(cosine.cluster_centers_, axis=1), 1)


def test_a_saved_model_goes_on(tmp_path: Path) -> None:
    X = some_points(600)
    model = MiniBatchKMeans(6, random_state=0).partial_fit(X[:300])
    model.save(tmp_path / "model.ronde")
    loaded = ronde.ml.load(tmp_path / "model.ronde")
    for each in (model, loaded):
        each.partial_fit(X[300:])
    assert model.cluster_centers_.tolist() == loaded.cluster_centers_.tolist()


def test_of_several_starts_the_best_counts() -> None:
    X = np.repeat(np.eye(8) * 100, 200, axis=0) + np.random.default_rng(0).normal(size=(1600, 8))
    params: dict[str, Any] = {"init": "random", "max_iter": 1, "reassignment_ratio": 0.0, "random_state": 3}
    losses = [MiniBatchKMeans(8, n_init=n, **params).fit(X).history_[0]["loss"] for n in (1, 3, 30)]
    assert losses[0] >= losses[1] > losses[2]
    assert MiniBatchKMeans(8, **params).fit(X).history_[0]["loss"] == losses[1]  # "auto"


def test_the_rows_among_which_centers_are_chosen() -> None:
    X = some_points()
    few = MiniBatchKMeans(6, init_size=6, batch_size=10, max_iter=1, random_state=0).fit(X)
    many = MiniBatchKMeans(6, init_size=6000, batch_size=10, max_iter=1, random_state=0).fit(X)
    assert many.history_[0]["loss"] < few.history_[0]["loss"]
    with pytest.warns(
        RuntimeWarning, match="init_size=2 should be larger than n_clusters=6: 18 rows are taken"
    ):
        MiniBatchKMeans(6, init_size=2).fit(X)


def test_labels_are_computed_if_wanted() -> None:
    X = some_points()
    model = MiniBatchKMeans(6, random_state=0).fit(X)
    centers = model.cluster_centers_
    model.set_params(compute_labels=False).fit(X)
    np.testing.assert_array_equal(model.cluster_centers_, centers)
    assert not hasattr(model, "labels_")
    assert not hasattr(model, "inertia_")
    assert model.fit_predict(X).tolist() == model.predict(X).tolist()


def test_labels_of_partial_fits_are_computed_if_wanted() -> None:
    X = some_points(500)
    model = MiniBatchKMeans(6, random_state=0).partial_fit(X)
    centers = model.cluster_centers_.copy()
    assert model.labels_.tolist() == model.predict(X).tolist()
    model.set_params(compute_labels=False).partial_fit(X)
    assert not hasattr(model, "labels_")
    assert not hasattr(model, "inertia_")
    assert model.n_steps_ == 2
    assert (model.cluster_centers_ != centers).any()


@pytest.mark.parametrize("init", ["k-means||", "random"])
def test_first_centers_are_rows_with_weight(init: str) -> None:
    X, weights = some_points() + 1000, np.zeros(6000)
    weights[[7, 1234, 2345, 4567, 5999]] = 1  # none of the first batch, but by chance
    params: dict[str, Any] = {
        "init": init,
        "batch_size": 10,
        "init_size": 10,
        "random_state": 0,
        "max_iter": 1,
    }
    models = [
        MiniBatchKMeans(3, on=f"threads:{tasks}", **params).fit(X, sample_weight=weights) for tasks in (1, 3)
    ]
    rows = {row.tobytes() for row in X[weights > 0]}
    one_step = MiniBatchKMeans(3, **{**params, "batch_size": 6000, "reassignment_ratio": 0.0})
    one_step.fit(X, sample_weight=weights)
    assert all(row.tobytes() in rows for row in models[0].cluster_centers_)
    assert models[0].cluster_centers_.tobytes() == models[1].cluster_centers_.tobytes()
    assert one_step.inertia_ < np.square(X[weights > 0] - X[weights > 0].mean(axis=0)).sum()
