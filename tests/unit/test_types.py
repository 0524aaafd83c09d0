from __future__ import annotations

import json
import pickle
import re
from enum import IntEnum
from pathlib import Path

import pytest

from ronde import types
from ronde.types import DType, Kind, ReduceOp

HEADER = (Path(__file__).parents[2] / "cpp" / "base" / "types.h").read_text()


@pytest.mark.parametrize("enum", [DType, ReduceOp, Kind])
def test_numbers_are_those_of_the_header(enum: type[IntEnum]) -> None:
    (body,) = re.findall(rf"enum class {enum.__name__} : uint8_t {{(.*?)}};", HEADER, re.DOTALL)
    in_header = {name.lower(): int(number) for name, number in re.findall(r"k(\w+) = (\d+),", body)}
    assert {member.name.lower(): member.value for member in enum} == in_header


def test_sizes_are_those_of_the_header() -> None:
    (listed,) = re.findall(r"kBytes\[kDTypeCount\] = {(.*?)};", HEADER)
    assert [dtype.itemsize for dtype in DType] == [int(size) for size in listed.split(",")]


def test_reductions_have_names_of_their_own() -> None:
    for op in ReduceOp:
        assert getattr(types, op.name) is op
        assert op.name in types.__all__


def test_a_reduction_is_shown_by_its_name_and_counts_as_its_number() -> None:
    assert (repr(types.Sum), str(types.Max), f"{types.Average}") == (
        "ronde.Sum",
        "ronde.Max",
        "ronde.Average",
    )
    assert types.Max == 3 == int(types.Max)
    assert (f"{types.Max:03d}", str(int(types.Max)), json.dumps(types.Max)) == ("003", "3", "3")
    assert pickle.loads(pickle.dumps(types.Max)) is types.Max
