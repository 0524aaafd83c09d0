from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from ronde.comqueue.array_tree import describe_tree, leaves_of, map_leaves
from ronde.errors import UsageError


@dataclass
class Moments:
    mean: Any
    count: int


class Pair(NamedTuple):
    first: Any
    second: Any


def test_leaves_come_in_one_order_however_a_dict_was_filled() -> None:
    one, other = {"b": 1, "a": 2.5}, {"a": 2.5, "b": 1}
    assert (
        [leaf.item() for leaf in leaves_of(one, "x")]
        == [leaf.item() for leaf in leaves_of(other, "x")]
        == [2.5, 1]
    )
    assert describe_tree(one) == describe_tree(other)


def test_arrays_are_not_copied() -> None:
    array = np.arange(3)
    assert leaves_of([{"x": array}], "x")[0] is array


def test_a_mapped_tree_has_the_same_structure_and_kinds_of_leaves() -> None:
    tree = {
        "m": Moments(np.ones(2), 3),
        "p": Pair(1.5, np.float32(2)),
        "t": (True, None, np.bool_(True)),
        "l": [np.zeros((0, 2))],
    }
    mapped = map_leaves(tree, lambda leaf: leaf * 2)
    assert list(mapped) == ["m", "p", "t", "l"]
    assert isinstance(mapped["m"], Moments)
    assert mapped["m"].mean.tolist() == [2, 2]
    assert (mapped["m"].count, type(mapped["m"].count)) == (6, int)
    assert mapped["p"] == Pair(3.0, np.float32(4))
    assert type(mapped["p"].second) is np.float32
    assert mapped["t"] == (2, None, 2)  # of a truth value the sum counts
    assert mapped["l"][0].shape == (0, 2)


@pytest.mark.parametrize("tree", ["text", {"a": [object()]}, np.array([None])])
def test_other_leaves_are_named_by_their_place(tree: object) -> None:
    with pytest.raises(UsageError, match=r"sums.* is of type .*expected an array, a number"):
        leaves_of(tree, "sums")


def test_the_place_of_a_leaf() -> None:
    with pytest.raises(UsageError, match=r"^sums\['a'\]\[1\]\.mean is of type str"):
        leaves_of({"a": [1, Moments("x", 1)]}, "sums")


def test_the_description_tells_structures_dtypes_and_shapes_apart() -> None:
    trees: list[Any] = [
        np.ones(3),
        np.ones(3, np.float32),
        np.ones((3, 1)),
        [np.ones(3)],
        (np.ones(3),),
        {"a": np.ones(3)},
        {"b": np.ones(3)},
        1,
        1.0,
        None,
    ]
    assert len({describe_tree(tree) for tree in trees}) == len(trees)
