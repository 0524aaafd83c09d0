"""Fits whose models must have the same bits wherever their tasks run, from rows in memory and in Parquet files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import iterate

__all__ = ["FITS", "Fit", "lose_a_task_once"]

Fit = Callable[[Path | None, Any], bytes]  # gets a new folder for Parquet files (None: no files) and `on`

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(1000, 3))
COUNTS = RANDOM.poisson(0.3, size=(200, 30)).astype(np.float64)
NUMBERS = (RANDOM.integers(0, 200, (400, 1)) + RANDOM.integers(0, 5, (400, 8))) % 200
SENTENCES = [[f"word{number}" for number in row] for row in NUMBERS]


def _parquet(folder: Path | None, columns: Mapping[str, Any]) -> str | None:
    """Return the path of a new folder of Parquet files with these columns; None if a package for it is missing."""
    if folder is None:
        return None
    try:
        import fsspec  # noqa: F401
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(next(iter(columns.values())))), 3)):
        some = {name: [values[row] for row in rows] for name, values in columns.items()}
        # NaN becomes null.
        table = pyarrow.table({name: pyarrow.array(each, from_pandas=True) for name, each in some.items()})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=100)
    return str(folder)


def _columns(rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {f"column{number:02}": column for number, column in enumerate(rows.T)}


def _kmeans(folder: Path | None, on: Any) -> bytes:
    from ronde.ml import KMeans

    model = KMeans(4, random_state=0, max_iter=10, tol=0, on=on)
    model.fit(_parquet(folder, _columns(POINTS)) or POINTS)
    return model.cluster_centers_.tobytes() + model.labels_.tobytes() + repr(model.inertia_).encode()


def _boosting(folder: Path | None, on: Any) -> bytes:
    from ronde.ml import GradientBoostingClassifier

    model = GradientBoostingClassifier(max_iter=15, max_leaf_nodes=8, subsample=0.7, random_state=0, on=on)
    rows, y = np.where(POINTS > 2, np.nan, POINTS), (POINTS[:, 0] * POINTS[:, 1] > 0).astype(np.int64)
    if path := _parquet(folder, {**_columns(rows), "label": y}):
        model.fit(path, "label")
    else:
        model.fit(rows, y)
    return b"".join(array.tobytes() for array in model.trees_.values()) + repr(model.history_[-1]).encode()


def _topics(folder: Path | None, on: Any) -> bytes:
    from ronde.ml import LatentDirichletAllocation

    model = LatentDirichletAllocation(5, max_iter=20, random_state=0, on=on)
    model.fit(_parquet(folder, _columns(COUNTS)) or COUNTS)
    return model.components_.tobytes() + repr(model.history_).encode()


def _words(folder: Path | None, on: Any) -> bytes:
    from ronde.ml import Word2Vec

    model = Word2Vec(16, epochs=2, min_count=1, n_shards=3, words_per_step=200, random_state=0, on=on)
    if path := _parquet(folder, {"sentence": SENTENCES}):
        model.fit(path, column="sentence")
    else:
        model.fit(SENTENCES)
    return model.vectors_.tobytes() + model.word_bytes_.tobytes() + repr(model.history_).encode()


FITS: dict[str, Fit] = {"k-means": _kmeans, "boosting": _boosting, "topics": _topics, "words": _words}

MODULES = (
    "ronde.ml.trees.boosted_estimator",
    "ronde.ml.topics.latent_dirichlet_allocation",
    "ronde.ml.words.word2vec",
)


def lose_a_task_once(
    monkeypatch: pytest.MonkeyPatch, lose: Callable[[], None], flag: Path, step_no: int
) -> None:
    """Let task 1 of the fits that save checkpoints lose itself in a step, unless the file exists that it then creates.

    `lose`: travels to the tasks as a whole, as what this function defines does.
    """
    path = str(flag)

    class LosingStep:
        def __init__(self, step: Any) -> None:
            self._step = step

        def __call__(self, c: Any) -> None:
            import os

            if (c.task_id, c.step_no) == (1, step_no) and not os.path.exists(path):
                with open(path, "x"):
                    pass
                lose()
            self._step(c)

    for name in MODULES:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "iterate", lambda step, **options: iterate(LosingStep(step), **options))
