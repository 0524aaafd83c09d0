"""Iterative algorithms and estimators over a Dask data frame: the tasks run where its partitions are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.conformance.cluster_kinds import dask_scheduler

from ronde.comqueue import IterationStep, iterate, read
from ronde.errors import RemoteError, UsageError

pytestmark = [pytest.mark.dask, pytest.mark.slow]
distributed: Any = pytest.importorskip("distributed", reason="Dask is not installed here")
pandas: Any = pytest.importorskip("pandas", reason="pandas is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

ROWS = 300
TOTAL = ROWS * (ROWS - 1) / 2


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with dask_scheduler() as address, distributed.Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def frame(client: Any) -> Any:
    """Rows in three partitions: a number n, its half, and a text."""
    import dask.dataframe

    n = np.arange(ROWS)
    rows = pandas.DataFrame({"n": n, "half": n / 2, "text": ["a"] * ROWS})
    return dask.dataframe.from_pandas(rows, npartitions=3)


def sum_step(c: IterationStep) -> None:
    c.state.sums = c.sum_blocks(lambda rows: {"X": rows.X.sum(axis=0), "y": rows.y.sum()})
    c.state.shares = c.gather(len(c.row_range))


def sums_of(data: Any, on: Any = "dask:2") -> tuple[list[float], float, list[int]]:
    state = iterate(sum_step, data=data, state={}, max_iter=2, on=on).state
    return state.sums["X"].tolist(), state.sums["y"], sorted(state.shares)


@pytest.mark.parametrize("kind", ["lazy", "persisted"])
def test_tasks_get_the_partitions(client: Any, frame: Any, kind: str) -> None:
    data = read(frame.persist() if kind == "persisted" else frame, {"X": ["n", "half"], "y": "half"})
    assert sums_of(data) == ([TOTAL, TOTAL / 2], TOTAL / 2, [ROWS // 3, ROWS // 3 * 2])
    assert not client.list_datasets()


def test_the_cluster_does_not_keep_partitions_that_nobody_gets(client: Any, frame: Any) -> None:
    from ronde.dask.frame_rows import compute_partitions

    class LostClient:
        def get_dataset(self, name: str) -> Any:
            assert client.list_datasets() == (name,)
            raise OSError("the connection is lost")

    own: Any = LostClient()
    with pytest.raises(OSError, match="the connection is lost"):
        compute_partitions(client, own, frame, 2, lambda: True)
    assert not client.list_datasets()


def test_partitions_are_read_where_they_lie(client: Any) -> None:
    """Each worker has a partition of its own, and the task there gets it."""
    import dask.dataframe

    here, there = sorted(client.nthreads())
    parts = [
        client.submit(pandas.DataFrame, {"n": [float(number)] * 10}, workers=[worker], pure=False)
        for number, worker in enumerate((there, here))
    ]
    frame = dask.dataframe.from_delayed(parts, meta={"n": "f8"}, verify_meta=False)

    def step(c: IterationStep) -> None:
        c.state.seen = c.gather((c.data.n[0], os.environ["RONDE_TASK_ROWS"].split("/")[2]))

    state = iterate(step, data=read(frame, {"n": "n"}), state={}, max_iter=1, on="dask:2").state
    pids = {address: client.run(os.getpid)[address] for address in (here, there)}
    assert sorted(state.seen) == [(0.0, str(pids[there])), (1.0, str(pids[here]))]


def test_partitions_that_are_too_few_or_empty(frame: Any) -> None:
    columns = {"X": ["n", "half"], "y": "half"}
    few = frame.repartition(npartitions=1)
    totals, total, shares = sums_of(read(few, columns, memory_limit=0))  # streamed from the task's file
    assert (totals, total, sum(shares)) == ([TOTAL, TOTAL / 2], TOTAL / 2, ROWS)
    assert min(shares) > 0
    assert sums_of(read(frame[frame.n < 3], columns)) == ([3, 1.5], 1.5, [0, 3])


def test_an_estimator_takes_a_frame(frame: Any) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
    from ronde.ml import LinearRegression

    model = LinearRegression(on="dask:2").fit(frame, y="half")  # without the text
    assert model.coef_ == pytest.approx([0.5])
    assert list(model.feature_names_in_) == ["n"]
    with pytest.raises(ValueError, match=r"predict there, by frame.map_partitions\(model.predict\)"):
        model.predict(frame)


def test_the_error_of_unusable_data_names_the_cause(client: Any, frame: Any) -> None:
    with pytest.raises(UsageError, match="'x'"):
        read(frame, "x")
    with pytest.raises(UsageError, match="names are no strings, such as 0: rename them"):
        read(frame.rename(columns={"n": 0}))
    with pytest.raises(UsageError, match="the rows of 'data' are on a cluster: run the tasks there"):
        iterate(sum_step, data=read(frame), state={}, max_iter=1, on="threads:2")
    with pytest.raises(RemoteError, match="the data frame has no rows: expected at least one"):
        sums_of(read(frame[frame.n < 0], {"X": ["n"], "y": "half"}))
    failing = frame.map_partitions(lambda part: part / 0 if len(part) else part, meta=frame._meta)
    with pytest.raises(
        RemoteError, match="the partitions of the Dask data frame cannot be computed: TypeError"
    ):
        sums_of(read(failing, {"X": ["n"], "y": "half"}))
