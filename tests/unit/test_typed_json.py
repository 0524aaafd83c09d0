"""Every type that an annotation may name: what is written is read, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import ProtocolError
from ronde.typed_json import Natural, TypedJson


class Colour(Enum):
    RED = "red"
    GREEN = 2


class Level(IntEnum):
    NONE = 0
    ALL = 1


class Point(NamedTuple):
    x: int
    y: Natural


@dataclass(frozen=True)
class Circle:
    centre: Point
    radius: float
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Text:
    text: str
    shape: Circle | None = None


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Everything:
    words: tuple[Text | Circle | Nothing | None, ...]
    levels: Mapping[Level, frozenset[str]]
    by_name: Mapping[str, Mapping[int, Colour]]
    pair: tuple[int, bool]
    small: Annotated[int, range(-1, 4)]


FORM: TypedJson[Everything] = TypedJson(Everything, "test")
CIRCLE = Circle(Point(-1, 2), 0.5, Colour.GREEN)
VALUE = Everything(
    (Text("a", CIRCLE), CIRCLE, Nothing(), None, Text("\n")),
    {Level.NONE: frozenset("ab"), Level.ALL: frozenset()},
    {"x": {1: Colour.RED}},
    (3, True),
    -1,
)
PLAIN: list[Any] = [
    [["Text", "a", [[-1, 2], 0.5, 2]], ["Circle", [-1, 2], 0.5, 2], ["Nothing"], None, ["Text", "\n", None]],
    [[0, ["a", "b"]], [1, []]],
    [["x", [[1, "red"]]]],
    [3, True],
    -1,
]


def test_what_is_written_is_read() -> None:
    data = FORM.encode(VALUE)
    assert json.loads(data) == PLAIN
    assert b"\n" not in data
    read = FORM.decode(data)
    assert read == VALUE
    assert type(read.words[1].centre) is Point  # type: ignore[union-attr]
    assert {type(level) for level in read.levels} == {Level}


WRONG: list[tuple[int, object]] = [
    (0, [["Text", "a"]]), (0, [["Text", "a", None, 1]]), (0, [["Point", 1, 2]]), (0, ["Nothing"]), (0, [[]]), (0, None),
    (0, [["Text", 1, None]]), (0, [["Circle", [-1, -1], 0.5, 2]]), (0, [["Circle", [0, 1], "1", 2]]),
    (0, [["Circle", [0, 1], 1, 2.0]]), (0, [["Circle", [0, 1], 1, "RED"]]), (0, [["Circle", [0, 1], True, 2]]),
    (0, [["Circle", [0, 1], 10**400, 2]]), (0, [["Circle", [[0], 1], 1, 2]]), (0, [[["Text"], "a", None]]),
    (1, [[2, []]]), (1, [[True, []]]), (1, [[0, "ab"]]), (1, [[0, [1]]]), (1, [[0]]), (1, {"0": []}),
    (2, [["x", [["1", "red"]]]]), (2, [["x", [[1, ["red"]]]]]), (3, [3]), (3, [3, 1]), (3, [1 << 63, True]),
    (3, [1.0, True]), (4, 4), (4, -2), (4, False), (4, "1"),
]  # fmt: skip


@pytest.mark.parametrize(("index", "value"), WRONG)
def test_anything_else_is_refused(index: int, value: object) -> None:
    with pytest.raises(ProtocolError, match="malformed test: "):
        FORM.decode(json.dumps([*PLAIN[:index], value, *PLAIN[index + 1 :]]).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[", b"{}", b"null", b"[]", b"\xff", b"[" * 100_000, b"[" + b"9" * 5000 + b"]"]
)
def test_bytes_that_are_no_such_json_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed test: "):
        FORM.decode(data)


@given(st.floats())
def test_every_float_travels(value: float) -> None:
    form: TypedJson[float] = TypedJson(float, "number")
    read = form.decode(form.encode(value))
    assert read == value or (math.isnan(read) and math.isnan(value))


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.sampled_from(["Text", "Nothing", "red"]),
    ),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(st.integers(0, 4), JSON)
def test_any_json_is_a_value_or_an_error(index: int, plain: object) -> None:
    try:
        value = FORM.decode(json.dumps([*PLAIN[:index], plain, *PLAIN[index + 1 :]]).encode())
    except ProtocolError:
        return
    assert FORM.decode(FORM.encode(value)) == value
