"""Columns of Arrow tables as arrays, and what a column must not be."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pytest

from ronde.data.columns import ColumnSelection, to_array
from ronde.errors import UsageError

pa: Any = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")


def test_none_stands_for_the_numbers_that_no_other_array_has() -> None:
    chosen = ColumnSelection(
        {"y": "label", "X": None}, ["a", "label", "b"], ["a", "label", "b", "text"], "it"
    )
    assert (chosen.columns_of("y"), chosen.columns_of("X")) == (("label",), ("a", "b"))
    assert chosen.names == ("label", "a", "b")


def test_arrays_of_all_kinds() -> None:
    nested = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 0], [1, 2]]])
    assert to_array("x", nested.slice(1)).tolist() == [[[5, 6], [7, 8]], [[9, 0], [1, 2]]]
    fixed = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert to_array("x", fixed.slice(1)).tolist() == [[3.0, 4.0]]
    assert to_array("x", pa.array([True, False])).dtype == np.bool_
    assert to_array("x", pa.array([decimal.Decimal("1.5")])).tolist() == [1.5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, None], "'x' in f.parquet has 1 missing values"),
        ([[1.0], [None]], "1 missing values"),
        ([[1.0], [2.0, 3.0]], "lists of 1 to 2 values"),
        (["a"], "has the type string"),
        ([{"type": 1, "values": [1.0]}], "vector_to_array"),
    ],
)
def test_what_is_no_array(values: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        to_array("x", pa.array(values), "f.parquet")
