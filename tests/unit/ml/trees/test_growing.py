"""The limit of rows of a tree, which follows from the bits of its integers."""

from __future__ import annotations

import pytest

from ronde._native import tree_largest_integers
from ronde.errors import UsageError
from ronde.ml.trees.growing import MOST_ROWS, check_row_count


def test_with_the_most_rows_integers_still_differ() -> None:
    assert min(tree_largest_integers(MOST_ROWS)) >= 4
    assert min(tree_largest_integers(MOST_ROWS + 1)) < 2


def test_more_rows_are_an_error() -> None:
    check_row_count(MOST_ROWS)
    with pytest.raises(
        UsageError, match="1,073,741,824 rows, and trees are grown from at most 1,073,741,823"
    ):
        check_row_count(MOST_ROWS + 1)
