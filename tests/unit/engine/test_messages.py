from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.engine.messages import (
    AllJoined,
    CallSite,
    Evict,
    FailTensor,
    JoinData,
    Joined,
    LeaveEngine,
    Leaving,
    Left,
    Message,
    Request,
    Run,
    StreamItem,
    TensorType,
    Tune,
    decode_requests,
    decode_stream,
    encode_requests,
    encode_stream,
)
from ronde.errors import ProtocolError
from ronde.types import DType, Kind, ReduceOp

NATURALS = st.integers(0, 2**63 - 1)
REQUESTS = st.builds(
    Request,
    kind=st.sampled_from(Kind),
    name=st.text(),
    dtype=st.sampled_from(DType),
    shape=st.lists(NATURALS, max_size=4).map(tuple),
    op=st.sampled_from(ReduceOp),
    root=st.integers(-1, 100),
    prescale=st.floats(allow_nan=False),
    postscale=st.floats(allow_nan=False),
    device=st.text(max_size=8),
    splits=st.lists(st.integers(-5, 2**40), max_size=4).map(tuple),
    more=st.lists(
        st.builds(TensorType, st.sampled_from(DType), st.lists(NATURALS, max_size=4).map(tuple)), max_size=3
    ).map(tuple),
)
MESSAGES = st.lists(
    st.one_of(
        REQUESTS, st.builds(CallSite, st.text(), st.text()), st.just(JoinData()), st.just(LeaveEngine())
    ),
    max_size=5,
)
ITEMS = st.lists(
    st.one_of(
        st.builds(
            Run,
            REQUESTS,
            st.lists(NATURALS, max_size=4).map(tuple),
            st.integers(-1, 2**32),
            st.lists(NATURALS, max_size=4).map(tuple),
        ),
        st.builds(Evict, NATURALS),
        st.builds(FailTensor, st.text(), st.text()),
        st.builds(Joined, st.lists(NATURALS, max_size=4).map(tuple)),
        st.builds(AllJoined, NATURALS),
        st.builds(Tune, *[NATURALS] * 7),
        st.builds(Leaving, NATURALS),
        st.builds(Left, NATURALS),
    ),
    max_size=5,
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["Request", "Run", "Evict", "FailTensor", ""]),
    ),
    lambda inner: st.lists(inner, max_size=12),
    max_leaves=30,
)

GRAD = Request(Kind.allreduce, "grad", DType.float32, (3, 4))
ENCODED = ["Request", 1, "grad", 11, [3, 4], 0, -1, 1.0, 1.0, "cpu", [], []]


@given(MESSAGES)
def test_requests_come_back_as_they_were(messages: list[Message]) -> None:
    decoded = decode_requests(encode_requests(messages))
    assert decoded == messages
    assert [type(message) for message in decoded] == [type(message) for message in messages]


@given(ITEMS)
def test_the_stream_comes_back_as_it_was(items: list[StreamItem]) -> None:
    assert decode_stream(encode_stream(items)) == items


def test_types_come_back_too() -> None:
    [request] = decode_requests(encode_requests([GRAD]))
    assert isinstance(request, Request)
    assert type(request.kind) is Kind
    assert type(request.dtype) is DType
    assert type(request.op) is ReduceOp
    assert type(request.prescale) is float
    assert type(request.shape) is tuple


def test_messages_are_lists_of_json_without_spaces() -> None:
    assert json.loads(encode_requests([GRAD, LeaveEngine()])) == [ENCODED, ["LeaveEngine"]]
    assert b" " not in encode_requests([GRAD])
    assert json.loads(
        encode_stream([Run(GRAD, (1, 2), -1), Evict(7), FailTensor("grad", "no"), Leaving(2), Left(3)])
    ) == [
        ["Run", ENCODED[1:], [1, 2], -1, []],
        ["Evict", 7],
        ["FailTensor", "grad", "no"],
        ["Leaving", 2],
        ["Left", 3],
    ]
    group = replace(GRAD, more=(TensorType(DType.int8, (2,)), TensorType(DType.bool, ())))
    assert json.loads(encode_requests([group, JoinData()])) == [
        [*ENCODED[:-1], [[5, [2]], [0, []]]],
        ["JoinData"],
    ]
    assert json.loads(encode_stream([Joined((2,)), AllJoined(0)])) == [["Joined", [2]], ["AllJoined", 0]]


def test_nothing_to_say_is_no_bytes() -> None:
    assert encode_requests([]) == encode_stream([]) == b""
    assert decode_requests(b"") == []
    assert decode_stream(b"") == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_odd_factors_travel(value: float) -> None:
    [request] = decode_requests(
        encode_requests([Request(Kind.allreduce, "x", DType.float32, (), postscale=value)])
    )
    assert isinstance(request, Request)
    assert repr(request.postscale) == repr(value)


BAD_FIELDS = [
    (1, 99), (1, True), (1, "allreduce"), (2, None), (2, 5), (3, -1), (3, 11.0), (4, 3), (4, [-1]), (4, [2**63]),
    (4, [1.0]), (4, [True]), (4, "34"), (5, 99), (6, None), (6, 0.5), (7, "1"), (7, None), (7, 10**400), (8, [1.0]),
    (9, 0), (10, None), (10, ["1"]), (11, None), (11, [1]), (11, [[1]]), (11, [[1, 2]]), (11, [[99, []]]),
    (11, [[1, [-1]]]),
]  # fmt: skip


@pytest.mark.parametrize(("index", "value"), BAD_FIELDS)
def test_a_bad_field_is_refused(index: int, value: object) -> None:
    assert decode_requests(json.dumps([ENCODED]).encode()) == [GRAD]
    assert decode_stream(json.dumps([["Run", ENCODED[1:], [], -1, []]]).encode()) == [Run(GRAD, (), -1)]
    bad = [*ENCODED[:index], value, *ENCODED[index + 1 :]]
    with pytest.raises(ProtocolError, match="malformed message of the negotiation"):
        decode_requests(json.dumps([bad]).encode())
    with pytest.raises(ProtocolError, match="malformed message of the negotiation"):
        decode_stream(json.dumps([["Run", bad[1:], [], -1, []]]).encode())


@pytest.mark.parametrize(
    "text",
    [
        "[", "]", "{}", "[]", "null", "0", '"Request"', "[[]]", "[null]", "[[0]]", "[[null]]", "[[[]]]",
        '[["Request"]]', '[["LeaveEngine", 1]]', '[["Evict"]]', '[["Evict", -1]]', '[["Evict", true]]',
        '[["Evict", 1, 2]]', '[["Left", "1"]]', '[["Run", [], [], 0]]', '[["Run", ["LeaveEngine"], [], 0, []]]',
        '[["Run", null, [], 0, []]]', '[["FailTensor", "x"]]', '[["FailTensor", 1, "x"]]', '[["CallSite", "x"]]',
        '[["CallSite", "x", 12]]', '[["Jump"]]', '[["TensorType", 1, []]]', '[["LeaveEngine"]] x', "[" * 100_000,
        "[" + "9" * 5000 + "]", '[{"LeaveEngine": 1}]',
    ],
)  # fmt: skip
def test_malformed_text_is_refused(text: str) -> None:
    for decode in (decode_requests, decode_stream):
        with pytest.raises(ProtocolError, match="malformed message of the negotiation"):
            decode(text.encode())


def test_each_direction_has_its_own_messages() -> None:
    with pytest.raises(
        ProtocolError, match=r"'Evict', 1.* is not one of Request, CallSite, JoinData, LeaveEngine"
    ):
        decode_requests(encode_stream([Evict(1)]))
    with pytest.raises(
        ProtocolError,
        match="is not one of Run, Evict, FailTensor, Joined, AllJoined, Tune, Leaving, Left",
    ):
        decode_stream(encode_requests([LeaveEngine()]))


@given(st.binary(max_size=60))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    for decode in (decode_requests, decode_stream):
        try:
            decode(data)
        except ProtocolError:
            pass


@given(JSON)
def test_any_json_is_messages_or_an_error(value: object) -> None:
    data = json.dumps(value).encode()
    for decode in (decode_requests, decode_stream):
        try:
            decode(data)
        except ProtocolError:
            pass
