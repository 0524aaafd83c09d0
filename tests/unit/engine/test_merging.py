"""Merged requests are those of the ranks: by example, and for any requests along any tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde import _native
from ronde.engine.merging import (
    Batch,
    BatchReader,
    Contribution,
    batch_of,
    batch_of_outboxes,
    children_of,
    encode_batch,
    merge_batches,
    parent_of,
    ranks_under,
)
from ronde.engine.messages import CallSite, LeaveEngine, Message, Request, encode_requests
from ronde.engine.negotiation import Coordinator
from ronde.errors import ProtocolError
from ronde.rank_set import RankSet
from ronde.types import DType, Kind

GRAD = Request(Kind.allreduce, "grad", DType.float32, (3, 4))


def words(*shape: int) -> Request:
    return Request(Kind.allgather, "words", DType.int64, shape)


def parts(rows: int, *splits: int) -> Request:
    return Request(Kind.alltoall, "parts", DType.float64, (rows, 2), splits=splits)


def ranks(*each: int) -> RankSet:
    return RankSet.of(each)


def merged(*by_rank: list[Message]) -> Batch:
    return merge_batches([batch_of(ranks(rank), messages) for rank, messages in enumerate(by_rank)])


def sent(batch: Batch) -> Batch:
    return BatchReader().read(encode_batch(batch), batch.ranks)


class TestMerge:
    def test_what_is_equal_is_said_once(self) -> None:
        other = replace(GRAD, name="other")
        batch = merged([GRAD], [other, GRAD], [GRAD], [])
        assert batch == Batch(
            ranks(0, 1, 2, 3), (Contribution(ranks(0, 1, 2), GRAD), Contribution(ranks(1), other))
        )

    def test_what_must_not_differ_is_kept_apart(self) -> None:
        odd = replace(GRAD, dtype=DType.float64)
        assert merged([GRAD], [odd], [GRAD]).contributions == (
            Contribution(ranks(0, 2), GRAD),
            Contribution(ranks(1), odd),
        )

    def test_rows_that_may_differ_are_kept_by_rank(self) -> None:
        [contribution] = merged([words(2, 5)], [words(0, 5)], [words(7, 5)]).contributions
        assert contribution == Contribution(ranks(0, 1, 2), words(2, 5), ((2,), (0,), (7,)))
        assert contribution.request(2) == words(7, 5)
        [contribution] = merged([parts(4)], [parts(3, 3, 0)]).contributions
        assert contribution == Contribution(ranks(0, 1), parts(4), ((4,), (3, 3, 0)))
        assert contribution.request(1) == parts(3, 3, 0)

    def test_ranks_that_come_later_may_be_lower(self) -> None:
        late = Batch(ranks(1, 5), (Contribution(ranks(1, 5), words(4), ((4,), (5,))),))
        early = Batch(ranks(0, 3), (Contribution(ranks(0, 3), words(9)),))
        [contribution] = merge_batches([late, early]).contributions
        assert contribution == Contribution(ranks(0, 1, 3, 5), words(9), ((9,), (4,), (9,), (5,)))

    def test_leaves_come_last(self) -> None:
        assert [
            contribution.message
            for contribution in merged([LeaveEngine()], [GRAD, LeaveEngine()], [GRAD]).contributions
        ] == [
            GRAD,
            LeaveEngine(),
        ]

    def test_a_message_twice_or_after_a_leave_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="rank 1 has requested tensor 'grad' twice"):
            merged([GRAD], [GRAD, GRAD])
        with pytest.raises(ProtocolError, match="rank 0 sends a message after it has left"):
            merged([LeaveEngine(), GRAD])
        with pytest.raises(ProtocolError, match="rank 0 comes twice"):
            merge_batches([batch_of(ranks(0), []), batch_of(ranks(0), [])])

    def test_equal_texts_are_read_once(self) -> None:
        same, other = encode_requests([GRAD, words(3)]), encode_requests([words(4)])
        batch = batch_of_outboxes({3: same, 4: other, 5: same, 6: b""})
        rows = Contribution(ranks(3, 4, 5), words(3), ((3,), (4,), (3,)))
        assert batch == Batch(ranks(3, 4, 5, 6), (Contribution(ranks(3, 5), GRAD), rows))


class TestTravel:
    def test_nothing_is_no_bytes(self) -> None:
        assert encode_batch(merged([], [])) == b""
        assert sent(merged([], [])) == Batch(ranks(0, 1))

    def test_equal_requests_of_all_are_as_large_as_one(self) -> None:
        many = merge_batches([batch_of(ranks(rank), [GRAD]) for rank in range(1000)])
        assert len(encode_batch(many)) == len(encode_requests([GRAD])) + 1

    @pytest.mark.parametrize(
        "line",
        [
            b"",
            b"x",
            b"\t",
            b"\tx",
            b"[[],[[1]]]\t[]",
            b'\t[["LeaveEngine"],["LeaveEngine"]]',
            b'[]\t[["LeaveEngine"]]',
            b'[[[0,9]],[]]\t[["LeaveEngine"]]',
            b'[[[1,0]],[]]\t[["LeaveEngine"]]',
            b'[[[0,1],[1,1]],[]]\t[["LeaveEngine"]]',
            b'[[[0,true]],[]]\t[["LeaveEngine"]]',
            b'[[],[[1],[1],[1]]]\t[["LeaveEngine"]]',
            b'[[[0,0]],[["x"]]]\t' + encode_requests([words(1)]),
            b"[[[0,0]],[[2]]]\t" + encode_requests([words(1)]),
            b"[[[0,1]],[[1]]]\t" + encode_requests([words(1)]),
            b"[[[0,0]],[[1]]]\t" + encode_requests([GRAD]),
        ],
    )
    def test_malformed_lines_are_refused(self, line: bytes) -> None:
        good = encode_requests([GRAD])
        with pytest.raises(ProtocolError):
            BatchReader().read(b"\t" + good + b"\n" + line, ranks(0, 1, 2))


# Any messages of ranks, along any tree.

REQUESTS = st.one_of(
    st.builds(lambda rows: words(rows, 5), st.integers(0, 3)),
    st.sampled_from([words(), words(1), words(1, 2, 3), GRAD, replace(GRAD, root=1)]),
    st.builds(
        lambda splits: parts(sum(splits), *splits), st.lists(st.integers(0, 2), min_size=3, max_size=5)
    ),
    st.builds(parts, st.integers(0, 12)),
    st.builds(lambda root: Request(Kind.broadcast, "root", DType.int8, (2,), root=root), st.integers(-1, 5)),
)
OUTBOXES = st.builds(
    lambda sites, requests, leaves: [
        *(CallSite(name, site) for name, site in sites.items()),
        *{request.name: request for request in requests}.values(),
        *leaves,
    ],
    st.dictionaries(st.sampled_from(["grad", "words"]), st.sampled_from(["train.py:12", "train.py:15"])),
    st.lists(REQUESTS, max_size=4),
    st.sampled_from([[], [], [], [LeaveEngine()]]),
)


def along_a_tree(outboxes: list[list[Message]], host_of: list[int], arity: int) -> list[Batch]:
    """The batches that arrive at rank 0; each travels as bytes."""
    hosts = sorted(set(host_of), key=host_of.index)
    ranks_of_host = [[rank for rank, each in enumerate(host_of) if each == host] for host in hosts]

    def at(host: int) -> list[Batch]:
        own = batch_of_outboxes({rank: encode_requests(outboxes[rank]) for rank in ranks_of_host[host]})
        reader = BatchReader()
        return [own] + [
            reader.read(encode_batch(merge_batches(at(child))), ranks_under(child, ranks_of_host, arity))
            for child in children_of(host, len(hosts), arity)
        ]

    return at(0)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[Message]], list[int], int]:
    outboxes = draw(st.lists(OUTBOXES, min_size=1, max_size=9))
    host_of = [draw(st.integers(0, 5)) for _ in outboxes]
    return outboxes, host_of, draw(st.integers(1, 4))


@given(worlds())
def test_every_rank_is_understood_whatever_the_tree(
    world: tuple[list[list[Message]], list[int], int],
) -> None:
    outboxes, host_of, arity = world
    understood: list[list[Message]] = [[] for _ in outboxes]
    for batch in along_a_tree(outboxes, host_of, arity):
        for contribution in batch.contributions:
            for rank in contribution.ranks:
                understood[rank].append(
                    contribution.request(rank)
                    if isinstance(contribution.message, Request)
                    else contribution.message
                )
    for heard, outbox in zip(understood, outboxes):
        assert sorted(map(str, heard)) == sorted(map(str, outbox))


@given(worlds())
def test_the_same_is_decided_whatever_the_tree(world: tuple[list[list[Message]], list[int], int]) -> None:
    outboxes, host_of, arity = world
    star = Coordinator(len(outboxes), 0).step(outboxes)
    tree = Coordinator(len(outboxes), 0).step_merged(along_a_tree(outboxes, host_of, arity))
    assert sorted(map(str, tree)) == sorted(map(str, star))


def depth(host: int, arity: int) -> int:
    """The number of hosts that a message passes on its way to host 0, this one included."""
    levels = 0
    while host > 0:
        host, levels = parent_of(host, arity), levels + 1
    return levels


def test_five_hosts_two_under_each() -> None:
    assert [list(children_of(host, 5, 2)) for host in range(5)] == [[1, 2], [3, 4], [], [], []]
    assert [parent_of(host, 2) for host in range(5)] == [-1, 0, 0, 1, 1]
    assert [depth(host, 2) for host in range(5)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("arity", "deepest"), [(1, 1249), (2, 10), (8, 4), (16, 3), (1249, 1), (5000, 1)])
def test_how_deep_1250_hosts_lie(arity: int, deepest: int) -> None:
    assert max(depth(host, arity) for host in range(1250)) == deepest


@given(st.integers(1, 300), st.integers(1, 400))
def test_every_host_is_under_the_one_that_knows_it(hosts: int, arity: int) -> None:
    below = [list(children_of(host, hosts, arity)) for host in range(hosts)]
    assert [host for each in below for host in each] == list(range(1, hosts))
    assert all(len(each) <= arity for each in below)
    for host, each in enumerate(below):
        assert all(
            parent_of(child, arity) == host and depth(child, arity) > depth(host, arity) for child in each
        )


@given(st.integers(1, 300), st.integers(1, 400))
def test_the_native_tree_is_the_same(hosts: int, arity: int) -> None:
    for host in range(hosts):
        around = [parent_of(host, arity), *children_of(host, hosts, arity)]
        assert _native.tree_around(host, hosts, arity) == around


def test_whose_ranks_are_under_a_host() -> None:
    ranks_of_host = [[0, 4], [1], [2, 3], [5], [6, 7]]
    assert [list(ranks_under(host, ranks_of_host, 2)) for host in range(5)] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 5, 6, 7],
        [2, 3],
        [5],
        [6, 7],
    ]
