"""Iterative algorithms over a Spark data frame: the tasks run where its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.clusters.spark_session import session_of_two_executors

from ronde.comqueue import IterationStep, iterate, read
from ronde.errors import RemoteError, UsageError

pytestmark = [pytest.mark.spark, pytest.mark.slow]
pytest.importorskip("ronde.spark", reason="PySpark is not installed here")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

ROWS = 30_000
TOTAL = ROWS * (ROWS - 1) / 2


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with session_of_two_executors(spark_driver_maxResultSize="100k") as session:
        yield session


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """Rows that the executors make, in three partitions: a number n, its half, a text, and a vector of the numbers."""
    from pyspark.ml.feature import VectorAssembler

    numbers = session.range(0, ROWS, 1, 3).selectExpr("id as n", "id / 2 as half", "'a' as text")
    return VectorAssembler(inputCols=["n", "half"], outputCol="vector").transform(numbers)


def sum_step(c: IterationStep) -> None:
    c.state.sums = c.sum_blocks(lambda rows: {"X": rows.X.sum(axis=0), "y": rows.y.sum()})
    c.state.shares = c.gather(len(c.row_range))


def share_step(c: IterationStep) -> None:
    """In which a task whose rows are right waits for the others."""
    c.state.shares = c.gather(len(c.row_range))


def test_rows_do_not_pass_through_the_driver(frame: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="maxResultSize"):
        frame.collect()
    data = read(frame, {"X": ["n", "vector"], "y": "half"})
    state = iterate(sum_step, data=data, state={}, max_iter=2, on="spark:2").state
    assert state.sums["X"].tolist() == [TOTAL, TOTAL, TOTAL / 2]
    assert state.sums["y"] == TOTAL / 2
    assert sorted(state.shares) == [ROWS // 3, ROWS // 3 * 2]  # partitions are joined, and no row moves
    assert "no such setting" not in capfd.readouterr().err


def test_partitions_that_are_too_few_or_empty(session: Any) -> None:
    one = session.range(0, 10, 1, 1).selectExpr("id as n", "array(id, id) as pair")
    data = read(one, {"X": ["pair"], "y": "n"}, memory_limit=0)  # streamed from the file of the Spark task
    state = iterate(sum_step, data=data, state={}, max_iter=1, on="spark:2").state
    assert (state.sums["X"].tolist(), sum(state.shares)) == ([45, 45], 10)
    assert min(state.shares) > 0
    first = session.range(0, 10, 1, 2).selectExpr("id as n", "array(id, id) as pair").filter("n < 3")
    data = read(first, {"X": ["pair"], "y": "n"})
    state = iterate(sum_step, data=data, state={}, max_iter=1, on="spark:2").state
    assert (state.sums["X"].tolist(), sorted(state.shares)) == ([3, 3], [0, 3])


def test_the_error_of_unusable_data_names_the_cause(frame: Any) -> None:
    with pytest.raises(UsageError, match=r"the data frame lacks the columns \['x'\]"):
        read(frame, "x")
    with pytest.raises(UsageError, match="column 'text' has the type string"):
        read(frame, "text")
    for place in ("threads:2", "local:1"):
        with pytest.raises(UsageError, match="the rows of 'data' are on a cluster: run the tasks there"):
            iterate(sum_step, data=read(frame), state={}, max_iter=1, on=place)
    holes = frame.selectExpr("if(n = 7, null, vector) as vector", "array(n, if(n = 7, null, n)) as pair")
    for column, message in (
        ("vector", r"'vector' in the data frame on task \d has 1 missing values: remove"),
        (
            "pair",
            r"'pair' .* has 1 missing values inside its lists: remove these rows, .* df.dropna\(\) keeps",
        ),
    ):
        with pytest.raises(RemoteError, match=message):
            iterate(share_step, data=read(holes, [column]), state={}, max_iter=1, on="spark:2")
    missing = frame.selectExpr("if(n = 7, null, n) as n")
    with pytest.raises(RemoteError, match=r"'n' in the data frame on task \d has 1 missing values"):
        iterate(share_step, data=read(missing, {"X": ["n"], "y": "n"}), state={}, max_iter=1, on="spark:2")


def test_a_frame_without_rows_says_so(session: Any) -> None:
    empty = session.range(0, 10, 1, 2).filter("id > 10")
    for frame in (empty, empty.repartition(3)):  # of the latter, Spark runs no task
        with pytest.raises(RemoteError, match="the data frame has no rows: expected at least one"):
            iterate(sum_step, data=read(frame, "id"), state={}, max_iter=1, on="spark:2")
