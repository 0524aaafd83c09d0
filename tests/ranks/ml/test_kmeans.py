"""K-means in processes: the bits are those of threads, also from files that the tasks read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

import ronde
from ronde.comqueue import read
from ronde.ml import KMeans, MiniBatchKMeans

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def points() -> NDArray[Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(20_000, 3)) + random.integers(4, size=(20_000, 1)) * 5


def assert_same_bits(first: KMeans, second: KMeans) -> None:
    assert first.cluster_centers_.tobytes() == second.cluster_centers_.tobytes()
    assert first.labels_.tobytes() == second.labels_.tobytes()
    assert first.inertia_ == second.inertia_
    assert first.history_ == second.history_


def test_processes_give_the_bits_of_threads(points: NDArray[Any]) -> None:
    in_threads = KMeans(5, random_state=0, on="threads:1").fit(points)
    for tasks in (2, 3):
        assert_same_bits(KMeans(5, random_state=0, on=f"local:{tasks}").fit(points), in_threads)


def test_files_give_the_bits_of_an_array(points: NDArray[Any], tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
    pq = pytest.importorskip("pyarrow.parquet", reason="PyArrow is not installed here")
    pq.write_table(pa.table(dict(zip("abc", points.T))), tmp_path / "points.parquet", row_group_size=3000)
    model = KMeans(5, random_state=0, on="local:2")
    in_memory = KMeans(5, random_state=0, on="threads:1").fit(points)
    assert_same_bits(model.fit(read(str(tmp_path))), in_memory)
    source = read(tmp_path / "points.parquet", memory_limit=100_000)  # too little: each step reads the files
    assert_same_bits(model.fit(source), in_memory)
    assert model.predict(source).tolist() == in_memory.labels_.tolist()


def test_the_ranks_of_a_job_have_one_result_without_a_seed() -> None:
    def fit() -> list[tuple[bytes, bytes]]:
        import ronde

        ronde.init()
        X = np.random.default_rng(0).normal(size=(500, 3))
        models = [KMeans(4, init="random", n_init=2), MiniBatchKMeans(4, batch_size=100)]
        return [(model.fit(X).cluster_centers_.tobytes(), model.labels_.tobytes()) for model in models]

    first, second = ronde.run(fit, np=2)
    assert first == second
