"""The decisions of the coordinator, and how requesters apply them, as examples and as properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.engine.messages import (
    Evict,
    FailTensor,
    LeaveEngine,
    Leaving,
    Left,
    Message,
    Request,
    Run,
    StreamItem,
)
from ronde.engine.negotiation import (
    KEPT_USES,
    Closed,
    Coordinator,
    Effect,
    Evicted,
    Execute,
    Failed,
    Insert,
    Requester,
)
from ronde.errors import PeerLostError, ProtocolError, UsageError
from ronde.types import Average, DType, Kind, Min


def grad(name: str = "grad", *shape: int) -> Request:
    return Request(Kind.allreduce, name, DType.float32, shape or (3, 4))


def gather(*shape: int) -> Request:
    return Request(Kind.allgather, "words", DType.int64, shape)


def exchange(rows: int, *splits: int) -> Request:
    return Request(Kind.alltoall, "parts", DType.float64, (rows, 2), splits=splits)


def agree(*requests: Request, capacity: int = 4) -> list[StreamItem]:
    """The stream after one request of each rank."""
    return Coordinator(len(requests), capacity).step([[request] for request in requests])


def reason(*requests: Request) -> str:
    [item] = agree(*requests)
    assert isinstance(item, FailTensor)
    assert item.name == requests[0].name
    return item.reason


def everybody(*requests: Request, size: int = 2) -> list[list[Message]]:
    return [list(requests) for _ in range(size)]


class TestCoordinator:
    def test_runs_what_all_have_requested(self) -> None:
        coordinator = Coordinator(3, 4)
        assert coordinator.step([[grad()], [], []]) == []
        assert coordinator.step([[], [], [grad()]]) == []
        assert coordinator.step([[], [grad()], []]) == [Run(grad(), (), 0)]
        assert coordinator.step([[], [grad()], []]) == [Evict(0)], "it has run, so this is a new request"

    def test_order_is_that_in_which_names_are_complete(self) -> None:
        coordinator = Coordinator(2, 4)
        items = coordinator.step([[grad("a"), grad("b"), grad("c")], [grad("c"), grad("a")]])
        assert items == [Run(grad("c"), (), 0), Run(grad("a"), (), 1)]
        assert coordinator.step([[], [grad("b")]]) == [Run(grad("b"), (), 2)]

    def test_one_rank_agrees_with_itself(self) -> None:
        assert agree(grad()) == [Run(grad(), (), 0)]

    def test_a_new_signature_evicts_at_once(self) -> None:
        coordinator = Coordinator(2, 4)
        coordinator.step(everybody(grad("a"), grad("b")))
        assert coordinator.step([[], [grad("b", 5)]]) == [Evict(1)]
        assert coordinator.step([[grad("b", 5)], []]) == [Run(grad("b", 5), (), 1)]

    def test_the_least_recently_used_response_is_evicted_before_the_run_that_needs_its_slot(self) -> None:
        coordinator = Coordinator(2, 2)
        coordinator.step(everybody(grad("a"), grad("b")))
        coordinator.step([[], []], used=[1] + [0] * KEPT_USES * 2)
        assert coordinator.step(everybody(grad("c"))) == [Evict(1), Run(grad("c"), (), 1)]
        assert coordinator.step(everybody(grad("d"))) == [Run(grad("d"), (), -1)], "`a` is still in use"
        coordinator.step([[], []], used=[1] * KEPT_USES * 2)
        assert coordinator.step(everybody(grad("d"))) == [Evict(0), Run(grad("d"), (), 0)]

    def test_use_counts_only_in_its_order(self) -> None:
        coordinator = Coordinator(1, 3)
        coordinator.step([[grad("a"), grad("b"), grad("c")]])
        coordinator.step([[]], used=[2, 0, 1])
        assert coordinator.cache.names() == {2: "c", 0: "a", 1: "b"}

    def test_more_new_names_than_slots_in_one_step(self) -> None:
        items = Coordinator(1, 1).step([[grad("a"), grad("b")]])
        assert items == [Run(grad("a"), (), 0), Run(grad("b"), (), -1)]

    def test_without_a_cache_nothing_has_a_slot(self) -> None:
        assert agree(grad(), grad(), capacity=0) == [Run(grad(), (), -1)]

    def test_a_barrier_is_not_cached(self) -> None:
        barrier = Request(Kind.barrier, "barrier", DType.uint8, ())
        coordinator = Coordinator(2, 1)
        coordinator.step(everybody(grad()))
        assert coordinator.step(everybody(barrier)) == [Run(barrier, (), -1)]

    def test_what_fails_is_not_cached_and_works_the_next_time(self) -> None:
        coordinator = Coordinator(2, 4)
        coordinator.step(everybody(grad()))
        first, second = coordinator.step([[grad("grad", 7)], [grad("grad", 8)]])
        assert first == Evict(0)
        assert isinstance(second, FailTensor)
        assert coordinator.step(everybody(grad())) == [Run(grad(), (), 0)]

    def test_every_kind_but_barrier_is_cached(self) -> None:
        for kind in (Kind.allreduce, Kind.reducescatter, Kind.allgather, Kind.alltoall):
            [item] = agree(*[Request(kind, "x", DType.int32, (4,))] * 2)
            assert isinstance(item, Run)
            assert item.slot == 0
        root = Request(Kind.broadcast, "x", DType.int32, (4,), root=1)
        assert agree(root, root) == [Run(root, (), 0)]

    def test_rows(self) -> None:
        assert agree(gather(2, 5), gather(0, 5), gather(7, 5)) == [Run(gather(2, 5), (2, 0, 7), 0)]
        assert agree(gather(), gather(4), gather()) == [Run(gather(), (1, 4, 1), 0)]
        assert agree(exchange(3, 1, 2), exchange(5, 0, 5)) == [Run(exchange(3, 1, 2), (1, 2, 0, 5), 0)]
        assert agree(exchange(4), exchange(3, 3, 0)) == [Run(exchange(4), (2, 2, 3, 0), 0)]

    def test_a_leave_comes_last_for_ever(self) -> None:
        coordinator = Coordinator(3, 4)
        items = coordinator.step(
            [[grad()], [grad(), grad("b"), LeaveEngine()], [grad(), grad("b"), LeaveEngine()]]
        )
        assert items == [Run(grad(), (), 0), Leaving(1)]
        items = coordinator.step([[grad("b"), grad("c"), LeaveEngine()], [], []])
        assert items == [Run(grad("b"), (), 1), Left(1)]
        assert coordinator.step([[grad("b")], [grad("b")], [grad("b")]], used=[99]) == []

    def test_nonsense_breaks_the_world(self) -> None:
        with pytest.raises(ProtocolError, match="rank 1 has requested tensor 'grad' twice"):
            Coordinator(2, 4).step([[], [grad(), grad()]])
        with pytest.raises(ProtocolError, match="requests of 1 ranks instead of 2"):
            Coordinator(2, 4).step([[]])
        with pytest.raises(ProtocolError, match="rank 0 sends a message after it has left"):
            Coordinator(2, 4).step([[LeaveEngine(), grad()], []])
        with pytest.raises(ValueError, match=r"slot 0 .* holds nothing"):
            Coordinator(2, 4).step([[], []], used=[0])

    def test_twice_in_two_rounds_is_nonsense_too(self) -> None:
        coordinator = Coordinator(2, 4)
        coordinator.step([[grad()], []])
        with pytest.raises(ProtocolError, match="rank 0 has requested tensor 'grad' twice"):
            coordinator.step([[grad()], []])


class TestMismatches:
    def test_shape_as_in_the_documentation(self) -> None:
        assert reason(grad(), grad(), grad("grad", 3, 5)) == (
            "tensor 'grad': rank 0 submitted allreduce with shape (3, 4), but rank 2 with shape (3, 5)"
        )

    @pytest.mark.parametrize(
        ("other", "difference"),
        [
            (replace(grad(), dtype=DType.float16), "with dtype float32, but rank 1 with dtype float16"),
            (replace(grad(), op=Min), "with op Sum, but rank 1 with op Min"),
            (replace(grad(), op=Average), "with op Sum, but rank 1 with op Average"),
            (replace(grad(), root=1), "with root -1, but rank 1 with root 1"),
            (replace(grad(), prescale=0.5), "with prescale_factor 1.0, but rank 1 with prescale_factor 0.5"),
            (
                replace(grad(), postscale=2.0),
                "with postscale_factor 1.0, but rank 1 with postscale_factor 2.0",
            ),
            (replace(grad(), device="cuda"), "with device cpu, but rank 1 with device cuda"),
            (replace(grad(), shape=(12,)), "with shape (3, 4), but rank 1 with shape (12,)"),
            (replace(grad(), shape=()), "with shape (3, 4), but rank 1 with shape ()"),
        ],
    )
    def test_each_field(self, other: Request, difference: str) -> None:
        assert reason(grad(), other) == f"tensor 'grad': rank 0 submitted allreduce {difference}"

    def test_kind(self) -> None:
        other = Request(Kind.broadcast, "grad", DType.float32, (3, 4), root=0)
        assert reason(grad(), other) == "tensor 'grad': rank 0 submitted allreduce, but rank 1 broadcast"

    def test_the_first_field_that_differs_on_the_first_rank_that_does(self) -> None:
        different = replace(grad(), op=Min, dtype=DType.int8)
        assert reason(grad(), grad(), different, grad("grad", 1)) == (
            "tensor 'grad': rank 0 submitted allreduce with dtype float32, but rank 2 with dtype int8"
        )

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [((2, 3), (2, 4)), ((2, 3), (2,)), ((), (2, 3)), ((2, 3, 4), (2, 4, 3)), ((1,), (1, 1))],
    )
    def test_only_the_first_axis_may_differ(self, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
        assert reason(gather(*ours), gather(*theirs)) == (
            f"tensor 'words': rank 0 submitted allgather with shape {ours}, but rank 1 with shape {theirs} "
            "(only the first axis may differ)"
        )
        parts = [Request(Kind.alltoall, "parts", DType.int8, shape) for shape in (ours, theirs)]
        assert "alltoall with shape" in reason(*parts)
        assert "(only the first axis may differ)" in reason(*parts)

    def test_root_out_of_range(self) -> None:
        for root in (2, -1):
            request = Request(Kind.broadcast, "weights", DType.float32, (2,), root=root)
            assert reason(request, request) == (
                f"tensor 'weights': all ranks submitted broadcast with root {root}, "
                "but there are only ranks 0 to 1"
            )

    def test_different_roots(self) -> None:
        requests = [Request(Kind.broadcast, "weights", DType.float32, (2,), root=root) for root in (0, 1)]
        assert "broadcast with root 0, but rank 1 with root 1" in reason(*requests)

    @pytest.mark.parametrize("splits", [(1,), (1, 1, 1), (1, 1), (4, -1), (3, 3)])
    def test_bad_splits(self, splits: tuple[int, ...]) -> None:
        assert reason(exchange(3, 1, 2), exchange(3, *splits)) == (
            f"tensor 'parts': rank 1 submitted alltoall with shape (3, 2) and splits {splits}, "
            "which are not 2 numbers of rows that add up to 3"
        )

    def test_rows_that_cannot_be_divided(self) -> None:
        assert reason(exchange(4), exchange(3)) == (
            "tensor 'parts': rank 1 submitted alltoall with shape (3, 2), "
            "whose first axis cannot be divided equally among 2 ranks"
        )


class TestMember:
    def test_a_miss_then_a_hit(self) -> None:
        member = Requester(0, 2)
        assert member.submit(grad()) is None
        assert member.take_outbox() == [grad()]
        assert member.take_outbox() == []
        run = Run(grad(), (), 2)
        assert member.apply_item(run) == [Insert(2, grad(), run), Execute(grad(), run)]
        assert member.cached_response("grad") == (grad(), run, 2)
        assert member.submit(grad()) == 2
        assert member.take_outbox() == []

    def test_a_hit_needs_the_own_request_not_the_lowest_ranks(self) -> None:
        member = Requester(1, 2)
        member.submit(gather(5))
        member.apply_item(Run(gather(2), (2, 5), 0))
        assert member.submit(gather(5)) == 0
        assert member.submit(gather(2)) is None

    def test_another_signature_is_a_miss_and_leaves_the_cache_alone(self) -> None:
        member = Requester(0, 1)
        member.submit(grad())
        member.apply_item(Run(grad(), (), 0))
        assert member.submit(replace(grad(), prescale=0.5)) is None
        assert member.cached_response("grad") is not None

    def test_without_a_slot_it_runs_and_is_forgotten(self) -> None:
        member = Requester(0, 1)
        member.submit(grad())
        assert member.apply_item(Run(grad(), (), -1)) == [Execute(grad(), Run(grad(), (), -1))]
        assert member.cached_response("grad") is None
        assert member.submit(grad()) is None

    def test_in_flight_twice(self) -> None:
        member = Requester(0, 2)
        member.submit(grad())
        for _ in range(2):  # queued, then sent
            with pytest.raises(UsageError, match="tensor 'grad' is in flight already"):
                member.submit(grad("grad", 1))
            member.take_outbox()
        with pytest.raises(ValueError, match="in flight already"):
            member.request_again(grad())

    def test_a_failure(self) -> None:
        member = Requester(0, 2)
        member.submit(grad())
        assert member.apply_item(FailTensor("grad", "because")) == [Failed(grad(), "because")]
        assert member.submit(grad()) is None

    def test_displaced_hits_are_requested(self) -> None:
        member = Requester(0, 2)
        member.submit(grad())
        member.take_outbox()
        member.apply_item(Run(grad(), (), 0))
        assert member.submit(grad()) == 0
        assert member.apply_item(Evict(0)) == [Evicted(0)]
        assert member.cached_response("grad") is None
        member.request_again(grad())
        assert member.take_outbox() == [grad()]

    def test_leaving(self) -> None:
        member = Requester(1, 2)
        member.submit(grad("a"))
        member.announce_leave()
        member.announce_leave()
        member.request_again(grad("b"))  # a hit that was pending when it left
        with pytest.raises(UsageError, match="tensor 'c' cannot be submitted: this rank is leaving"):
            member.submit(grad("c"))
        assert member.take_outbox() == [grad("a"), grad("b"), LeaveEngine()]
        assert member.take_outbox() == []
        assert not member.takes_back_hits
        assert member.apply_item(Leaving(1)) == [Leaving(1)]
        assert member.takes_back_hits
        why = "rank 1 has left"
        assert member.apply_item(Left(1)) == [Failed(grad("a"), why, 1), Failed(grad("b"), why, 1), Closed(1)]

    def test_after_a_rank_has_left(self) -> None:
        member = Requester(0, 2)
        member.submit(grad())
        assert member.apply_item(Left(1)) == [Failed(grad(), "rank 1 has left", 1), Closed(1)]
        with pytest.raises(PeerLostError, match="rank 1 has left") as caught:
            member.submit(grad())
        assert caught.value.rank == 1
        with pytest.raises(ProtocolError, match="comes after rank 1 has left"):
            member.apply_item(Evict(0))
        member.announce_leave()
        assert member.take_outbox() == []

    @pytest.mark.parametrize(
        ("item", "complaint"),
        [
            (Run(grad("b"), (), 1), "'b' is decided, but rank 0 has not requested it"),
            (FailTensor("b", "no"), "'b' is decided, but rank 0 has not requested it"),
            (Run(grad("a"), (), 0), "'a' goes to slot 0 without an eviction"),
            (Evict(1), "slot 1 is evicted, but holds nothing"),
        ],
    )
    def test_a_stream_that_contradicts_itself(self, item: StreamItem, complaint: str) -> None:
        member = Requester(0, 2)
        member.submit(grad("first"))
        member.apply_item(Run(grad("first"), (), 0))
        member.submit(grad("a"))
        with pytest.raises(ProtocolError, match=complaint):
            member.apply_item(item)

    @pytest.mark.parametrize(
        ("request_", "run"),
        [
            (gather(3), Run(gather(3), (3,), 0)),
            (gather(3), Run(gather(3), (3, 4), 0)),
            (gather(3), Run(replace(gather(3), kind=Kind.allreduce), (), 0)),
            (exchange(3, 1, 2), Run(exchange(3, 1, 2), (1, 1, 1, 1), 0)),
            (exchange(3, 1, 2), Run(exchange(3, 1, 2), (1, 2), 0)),
            (grad(), Run(grad(), (1,), 0)),
        ],
    )
    def test_a_response_that_does_not_fit_the_request(self, request_: Request, run: Run) -> None:
        member = Requester(1, 2)
        member.submit(request_)
        with pytest.raises(ProtocolError, match="is not what rank 1 requested"):
            member.apply_item(run)


NAMES = st.sampled_from("abcde")


@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.lists(st.lists(st.tuples(st.integers(0, 4), NAMES, st.integers(1, 2)), max_size=6), max_size=12),
)
def test_members_agree_whatever_is_submitted(
    size: int, capacity: int, rounds: Sequence[Sequence[tuple[int, str, int]]]
) -> None:
    """Without a hot path: hits are displaced only, so names may wait for ever, but no member contradicts another."""
    coordinator, members = Coordinator(size, capacity), [Requester(rank, size) for rank in range(size)]
    hits: list[dict[int, Request]] = [{} for _ in range(size)]
    for submissions in rounds:
        for rank, name, length in submissions:
            if rank < size and name not in [request.name for request in hits[rank].values()]:
                submit(members[rank], grad(name, length), hits[rank])
        stream = coordinator.step([member.take_outbox() for member in members])
        kinds = [
            [type(effect) for item in stream for effect in apply(member, item, hit)]
            for member, hit in zip(members, hits)
        ]
        assert all(each == kinds[0] for each in kinds)
        assert all(member.cached_names() == coordinator.cache.names() for member in members)
        assert len(coordinator.cache.names()) <= capacity


def submit(member: Requester, request: Request, hits: dict[int, Request]) -> None:
    try:
        slot = member.submit(request)
    except UsageError:
        return  # in flight
    if slot is not None:
        hits[slot] = request


def apply(member: Requester, item: StreamItem, hits: dict[int, Request]) -> list[Effect]:
    effects = member.apply_item(item)
    for effect in effects:
        if isinstance(effect, Evicted) and effect.slot in hits:
            member.request_again(hits.pop(effect.slot))
    return effects
