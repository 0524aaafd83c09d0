from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from ronde.comqueue.execution import SharedValues
from ronde.comqueue.partitions import Partitions, check_same_rows, divide_data
from ronde.errors import UsageError


def parts_of(data: Any, num_tasks: int) -> list[Any]:
    _, parts = divide_data({}, {"points": data}, num_tasks)
    return [part["points"] for part in parts]


class Frame:
    """Selects columns by [] and rows by iloc, as a data frame of pandas does."""

    def __init__(self, rows: list[int]) -> None:
        self.iloc, self.shape = rows, (len(rows), 1)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (np.arange(5), [[0, 1], [2, 3], [4]]),
        ([1, 2], [[1], [2], []]),
        (("a", "b", "c"), [("a",), ("b",), ("c",)]),
        (Frame([7, 8, 9]), [[7], [8], [9]]),
        (Partitions(["x", "y", "z"]), ["x", "y", "z"]),
    ],
)
def test_each_task_gets_consecutive_rows(data: Any, expected: list[Any]) -> None:
    parts = parts_of(data, 3)
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in parts] == expected


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia", "bsr"])
def test_rows_of_a_sparse_matrix(form: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    parts = parts_of(sparse.csr_matrix(np.eye(3)).asformat(form), 2)
    assert [part.toarray().tolist() for part in parts] == [[[1, 0, 0], [0, 1, 0]], [[0, 0, 1]]]


@pytest.mark.parametrize("data", ["text", {"a": 1}, 3, np.array(3)])
def test_what_has_no_rows_is_an_error(data: Any) -> None:
    with pytest.raises(UsageError, match=r"'points' is of type .* has no rows"):
        parts_of(data, 2)


def test_as_many_partitions_as_tasks() -> None:
    with pytest.raises(UsageError, match="'points' has 3 partitions for 2 tasks"):
        parts_of(Partitions([1, 2, 3]), 2)


def test_partitions_that_are_used_together_have_the_same_rows_in_each_task() -> None:
    two_one, one_two = Partitions([[1, 2], [3]]), Partitions([[1], [2, 3]])
    check_same_rows({"points": two_one, "labels": two_one, "weights": [1, 2, 3]})
    with pytest.raises(UsageError, match=r"'points' and 'labels' have \[2, 1\] and \[1, 2\] rows"):
        check_same_rows({"points": two_one, "labels": one_two})
    with pytest.raises(UsageError, match=r"'points' and 'weights' have \[2, 1\] and 4 rows"):
        check_same_rows({"points": two_one, "weights": [1, 2, 3, 4]})


def test_shared_values_are_copied_only_for_the_one_that_writes() -> None:
    given: list[Any] = [{"x": np.arange(4.0), "name": "first"}, [np.arange(3), "second"]]
    with ExitStack() as stack:
        values = SharedValues(given, stack)
        mine, others = values.load(0), values.load(0)
        mine["x"][0] = 9
        assert others["x"].tolist() == [0, 1, 2, 3]
        assert values.load(1)[0].tolist() == [0, 1, 2]
    assert mine["x"].tolist() == [9, 1, 2, 3]  # also after the memory file is closed
    assert given[0]["x"].tolist() == [0, 1, 2, 3]


def test_values_that_cannot_be_sent() -> None:
    with ExitStack() as stack, pytest.raises(UsageError, match=r"data cannot be sent to tasks: .*lock"):
        SharedValues([threading.Lock()], stack)
