"""Who gets how many rows."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from ronde.comm.splits import check_has_rows, even_share, even_split, row_counts
from ronde.errors import UnsupportedError, UsageError


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_an_even_split_is_that_of_numpy(size: int) -> None:
    for rows in range(2 * size + 2):
        parts = [len(part) for part in np.array_split(np.zeros(rows), size)]
        assert even_split(rows, size) == parts
        assert [even_share(rows, rank, size) for rank in range(size)] == parts


def test_given_splits_are_whole_numbers_for_all_rows() -> None:
    assert row_counts(None, 6, 3) == (2, 2, 2)
    assert row_counts(cast("list[int]", np.array([0, 5, 1])), 6, 3) == (0, 5, 1)
    with pytest.raises(UsageError, match="first dimension divisible by 4, not 6"):
        row_counts(None, 6, 4)
    with pytest.raises(UsageError, match="splits needs 2 whole numbers"):
        row_counts([1.5, 4.5], 6, 2)  # type: ignore[list-item]
    for splits in ([6], [3, 2], [-1, 7], [2, 2, 2]):
        with pytest.raises(UsageError, match=r"splits needs 2 numbers >= 0 that add up to 6 .*, not \["):
            row_counts(splits, 6, 2)


def test_an_array_without_axes_has_no_rows() -> None:
    check_has_rows((0,), "alltoall")
    with pytest.raises(UnsupportedError, match="alltoall splits the first axis; a 0-d array has none"):
        check_has_rows((), "alltoall")
