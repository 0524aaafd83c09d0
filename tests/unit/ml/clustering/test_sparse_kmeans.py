"""k-means of sparse rows: the same clusters as of dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from numpy.typing import NDArray
from scipy import sparse
from sklearn import cluster as sklearn_cluster

from ronde.comqueue import read
from ronde.data.rows import NamedArrays
from ronde.ml import ElasticNet, KMeans, MiniBatchKMeans
from ronde.ml.clustering import lloyd
from ronde.ml.clustering.points import distinct_points, find_nearest, sum_nearest
from ronde.ml.source_data import checked_parts

Array = NDArray[Any]


def sparse_rows(rows: int = 3000, dtype: str = "f8") -> Any:
    """Rows as of texts: each group has words of its own, and all share some."""
    random = np.random.default_rng(0)
    groups = random.integers(5, size=rows)
    counts = random.poisson(0.05, size=(rows, 60)) + np.where(
        np.arange(60) // 10 == groups[:, None], random.poisson(1.0, size=(rows, 60)), 0
    )
    return sparse.csr_array(counts.astype(dtype))


def in_two_parts(X: Any) -> Any:
    """Return the same rows, where the first number of each row is the sum of two stored ones."""
    first, data = X.indptr[:-1], X.data.copy()
    data[first] += 2
    columns = np.insert(X.indices, first, X.indices[first])
    return sparse.csr_array(
        (np.insert(data, first, -2.0), columns, X.indptr + np.arange(len(X.indptr))), X.shape
    )


class PartX:
    """A source whose rows are the part X."""

    def __init__(self, X: Any, in_memory: bool) -> None:
        self.num_rows, self.in_memory, self._X = X.shape[0], in_memory, X

    def load(self, begin: int, end: int) -> NamedArrays:
        return NamedArrays({"X": self._X[begin:end]})


@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csr_array, sparse.coo_array])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f8", 1e-9), ("f4", 1e-4)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_equals_scikit_learns_from_the_same_start(
    make: Any, dtype: str, tolerance: float, is_weighted: bool
) -> None:
    X = make(sparse_rows(dtype=dtype))
    start = sparse_rows(dtype=dtype)[:7].toarray()
    weights = np.random.default_rng(1).uniform(size=X.shape[0]) if is_weighted else None
    model = KMeans(7, init=start, tol=0, on="threads:2").fit(X, sample_weight=weights)
    other = sklearn_cluster.KMeans(7, init=start, n_init=1, tol=0).fit(X, sample_weight=weights)
    np.testing.assert_allclose(model.cluster_centers_, other.cluster_centers_, rtol=0, atol=tolerance)
    assert model.cluster_centers_.dtype == X.dtype
    assert model.n_iter_ == other.n_iter_
    assert model.labels_.tolist() == other.labels_.tolist() == model.predict(X).tolist()
    assert model.inertia_ == pytest.approx(other.inertia_, rel=tolerance)
    assert model.score(X, sample_weight=weights) == pytest.approx(-model.inertia_)
    np.testing.assert_allclose(model.transform(X), other.transform(X), atol=10 * tolerance)


@pytest.mark.parametrize("init", ["k-means||", "k-means++", "random"])
@pytest.mark.parametrize("few_rows", [100, 8192])
def test_the_number_of_tasks_does_not_matter(
    init: str, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lloyd, "FEW_ROWS", few_rows)
    X = sparse_rows()
    models = [
        KMeans(5, init=init, n_init=5, random_state=3, on=f"threads:{tasks}").fit(X) for tasks in (1, 2, 3, 4)
    ]
    assert len({(model.cluster_centers_.tobytes(), model.inertia_, model.n_iter_) for model in models}) == 1
    assert models[0].inertia_ <= 1.1 * sklearn_cluster.KMeans(5, n_init=10, random_state=0).fit(X).inertia_


def test_cosine_clusters_directions() -> None:
    X = sparse_rows()
    X = X[X.sum(axis=1) > 0]
    start = X[:5].toarray()
    found, expected = (KMeans(5, metric="cosine", init=start, tol=0).fit(rows) for rows in (X, X.toarray()))
    np.testing.assert_allclose(found.cluster_centers_, expected.cluster_centers_, atol=1e-9)
    assert found.labels_.tolist() == expected.labels_.tolist()
    with pytest.raises(ValueError, match="row 1 of these 2 consists of zeros"):
        KMeans(1, metric="cosine").fit(sparse.csr_array([[1.0, 0.0], [0.0, 0.0]]))


def test_places_on_the_globe_are_never_sparse() -> None:
    with pytest.raises(TypeError, match="Sparse data was passed"):
        KMeans(2, metric="haversine").fit(sparse.csr_array(np.eye(2)))


@pytest.mark.parametrize("on", ["threads:1", "threads:2"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_source_of_sparse_rows_has_no_place_on_the_globe(in_memory: bool, on: str) -> None:
    with pytest.raises(TypeError, match="Sparse data was passed for X, but dense data is required"):
        KMeans(2, metric="haversine", on=on).fit(PartX(sparse.csr_array(np.eye(2)), in_memory))
    with pytest.raises(TypeError, match="Sparse data was passed for X, but dense data is required"):
        KMeans(2, metric="haversine", on=on).fit(read(sparse.csr_array(np.eye(2))))


@pytest.mark.parametrize("kind", [KMeans, MiniBatchKMeans])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_read_takes_sparse_rows(kind: Any, metric: str, is_weighted: bool) -> None:
    X = sparse_rows(300)
    X = X[X.sum(axis=1) > 0]
    weights = np.random.default_rng(1).uniform(size=X.shape[0]) if is_weighted else None
    expected = kind(5, metric=metric, random_state=0).fit(X, sample_weight=weights)
    for rows in (read(X), read(in_two_parts(X)), read(X.astype("i8"))):
        model = kind(5, metric=metric, random_state=0, on="threads:2").fit(rows, sample_weight=weights)
        assert model.cluster_centers_.tobytes() == expected.cluster_centers_.tobytes()
        assert model.labels_.tolist() == expected.labels_.tolist() == model.predict(rows).tolist()
        assert model.transform(rows).tobytes() == expected.transform(X).tobytes()
        assert model.score(rows) == expected.score(X)
    X.data[-1] = np.nan
    with pytest.raises(
        ValueError, match=f"X contains NaN or infinity in the {X.shape[0]} rows from row 0 on"
    ):
        expected.predict(read(X))


@pytest.mark.parametrize("make", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("part", ["X", "y", "sample_weight"])
def test_a_source_has_no_complex_numbers(make: Any, part: str) -> None:
    parts: dict[str, Any] = {"X": np.eye(2), "y": np.ones(2), "sample_weight": np.ones(2)}
    parts[part] = parts[part] * 1j
    with pytest.raises(ValueError, match=f"{part} has the dtype complex128: expected real numbers"):
        checked_parts({**parts, "X": make(parts["X"])})
    with pytest.raises(ValueError, match="Complex data not supported"):
        KMeans(2).fit(read(make(1j * np.eye(2))))


def test_empty_clusters_get_the_farthest_rows() -> None:
    X = sparse.csr_array([[0.0, 1.0], [0.0, 1.1], [0.0, 1.2], [30.0, 0.0]])
    model = KMeans(2, init=np.array([[0.0, 1.0], [-900.0, 0.0]]), on="threads:2").fit(X)
    assert model.labels_.tolist() == [0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_a_row_that_is_a_center_does_not_become_another_one() -> None:
    """Its squared distance is a difference of large numbers, of which rounding must not leave something."""
    row = np.random.default_rng(0).normal(scale=1e6, size=(1, 50))
    model = KMeans(2, init=np.concatenate([row, row + 1e9])).fit(sparse.csr_array(np.repeat(row, 10, axis=0)))
    assert model.inertia_ == 0
    assert set(model.labels_) == {0}


@pytest.mark.parametrize("shuffles_columns", [False, True])
def test_near_points_far_from_the_origin_keep_their_digits(shuffles_columns: bool) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 3)) * 1e-3 + 1e4
    X, dense = sparse.csr_array(rows), np.ascontiguousarray(rows[:3])
    if shuffles_columns:
        X.indices[:], X.data[:] = X.indices.reshape(-1, 3)[:, ::-1].ravel(), rows[:, ::-1].ravel()
    found = find_nearest(X, dense)
    expected = ((rows - dense[found.labels]) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.squared_distances, expected, rtol=1e-6, atol=0)
    model = KMeans(3, init=dense).fit(X)
    expected_inertia = ((rows - model.cluster_centers_[model.labels_]) ** 2).sum()
    assert model.inertia_ == pytest.approx(expected_inertia, rel=1e-6)
    assert -model.score(X) == pytest.approx(model.inertia_)


def test_columns_without_a_stored_number_count() -> None:
    X = sparse_rows()
    X.data += 1e3
    centers = X[:5].toarray() + np.random.default_rng(0).normal(size=(5, X.shape[1]))
    found = find_nearest(X, centers)
    expected = ((X.toarray() - centers[found.labels]) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.squared_distances, expected, rtol=1e-6)
    assert (find_nearest(X, X[:5].toarray()).squared_distances[:5] == 0).all()


@pytest.mark.parametrize("make", [sparse.csr_matrix, sparse.csr_array, sparse.coo_array])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_numbers_at_the_same_place_are_summed(make: Any, metric: Any) -> None:
    X = sparse_rows(300)
    X = X[X.sum(axis=1) > 0]
    X_in_parts = in_two_parts(X)
    X_in_parts = make(X_in_parts.tocoo() if make is sparse.coo_array else X_in_parts)
    stored = X_in_parts.data.copy()
    assert len(stored) > len(X.data)
    models = [
        KMeans(5, metric=metric, n_init=1, random_state=0, on="threads:2").fit(rows)
        for rows in (X, X_in_parts)
    ]
    assert models[0].cluster_centers_.tobytes() == models[1].cluster_centers_.tobytes()
    assert models[0].inertia_ == models[1].inertia_
    assert models[0].transform(X).tobytes() == models[1].transform(X_in_parts).tobytes()
    y = X.sum(axis=1)
    fits = [ElasticNet(0.01).fit(rows, y).coef_.tobytes() for rows in (X, X_in_parts)]
    assert len(set(fits)) == 1
    of_a_source = checked_parts({"X": X_in_parts.astype("i8")})["X"]
    assert (of_a_source.data.tobytes(), of_a_source.dtype) == (X.data.tobytes(), X.dtype)
    assert X_in_parts.data.tobytes() == stored.tobytes()


def test_batches() -> None:
    X = sparse_rows()
    model = MiniBatchKMeans(5, random_state=0, batch_size=256, on="threads:2").fit(X)
    assert model.inertia_ <= 1.2 * sklearn_cluster.KMeans(5, n_init=10, random_state=0).fit(X).inertia_
    found, expected = (MiniBatchKMeans(5, init=X[:5].toarray()) for _ in range(2))
    for begin in range(0, 3000, 500):
        found.partial_fit(X[begin : begin + 500])
        expected.partial_fit(X[begin : begin + 500].toarray())
    np.testing.assert_allclose(found.cluster_centers_, expected.cluster_centers_, atol=1e-9)


def test_equal_points_count_as_one() -> None:
    rows = sparse.csr_array(np.array([[0, 2, 0], [1, 0, 0], [0, 2, 0], [0, 0, 0], [1, 0, 0.0]]))
    explicit = sparse.csr_array((np.array([2.0, 0.0]), np.array([1, 2]), np.array([0, 2])), (1, 3))
    distinct, places = distinct_points(sparse.vstack([rows, explicit], "csr"))
    assert distinct.shape == (3, 3)
    np.testing.assert_array_equal(distinct.toarray()[places], [*rows.toarray(), [0, 2, 0]])


def wide_rows(rows: int = 2000, columns: int = 20_000) -> Any:
    """Rows with a few stored numbers in many columns."""
    random = np.random.default_rng(0)
    return sparse.random_array((rows, columns), density=10 / columns, format="csr", rng=random)


def test_wide_rows_are_summed_in_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of a block have a number for each cluster and column, however few numbers are stored."""
    calls: list[int] = []

    def counted(points: Any, *arguments: Any) -> dict[str, Any]:
        calls.append(points.shape[0])
        return sum_nearest(points, *arguments)

    monkeypatch.setattr(lloyd, "sum_nearest", counted)
    X = wide_rows()
    model = KMeans(5, init=X[:5].toarray(), tol=0, max_iter=3, on="threads:1").fit(X)
    assert len(calls) == 3 * model.n_iter_  # blocks of 625 rows or more
    other = sklearn_cluster.KMeans(5, init=X[:5].toarray(), n_init=1, tol=0, max_iter=3).fit(X)
    assert model.inertia_ == pytest.approx(other.inertia_)


@pytest.mark.parametrize("columns", [20_000, 300_000])
def test_wide_rows_give_the_same_bits_for_any_number_of_tasks(columns: int) -> None:
    X = wide_rows(columns=columns)
    models = [KMeans(5, random_state=0, max_iter=3, on=f"threads:{tasks}").fit(X) for tasks in (1, 2, 3, 5)]
    assert len({model.cluster_centers_.tobytes() for model in models}) == 1
    assert len({(model.inertia_, str(model.history_[-1])) for model in models}) == 1


@pytest.mark.parametrize("init", ["k-means||", "k-means++", "random"])
def test_float32_rows_get_the_clusters_of_float64_rows(init: str) -> None:
    X = sparse_rows(300)
    X.data = np.random.default_rng(0).normal(size=len(X.data))
    wide, narrow = (
        KMeans(7, init=init, random_state=0, on="threads:1").fit(X.astype(dtype)) for dtype in "df"
    )
    assert narrow.n_iter_ == wide.n_iter_
    assert narrow.labels_.tolist() == wide.labels_.tolist()
