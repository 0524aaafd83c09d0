"""Groups of tensors under one name, and ranks that have run out of data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ronde.engine.messages import (
    AllJoined,
    Evict,
    FailTensor,
    JoinData,
    Joined,
    LeaveEngine,
    Leaving,
    Left,
    Request,
    Run,
    StreamItem,
    TensorType,
)
from ronde.engine.negotiation import (
    Closed,
    Contribute,
    Coordinator,
    Evicted,
    Execute,
    Insert,
    Requester,
)
from ronde.errors import ProtocolError, UsageError
from ronde.types import DType, Kind, Min

GRAD = Request(Kind.allreduce, "grad", DType.float32, (3,))
WORDS = Request(Kind.allgather, "words", DType.int64, (2, 5))
PART = TensorType(DType.float32, (4,))
GROUP = replace(GRAD, name="group", more=(PART, TensorType(DType.int8, ())))


def reason(*requests: Request) -> str:
    [item] = Coordinator(len(requests), 4).step([[request] for request in requests])
    assert isinstance(item, FailTensor)
    return item.reason


class TestGroups:
    def test_a_group_is_decided_as_one(self) -> None:
        assert Coordinator(2, 4).step([[GROUP], [GROUP]]) == [Run(GROUP, (), 0)]

    def test_rows_come_tensor_by_tensor(self) -> None:
        first = replace(WORDS, more=(TensorType(DType.int8, (7,)),))
        second = replace(WORDS, shape=(0, 5), more=(TensorType(DType.int8, ()),))
        run = Run(first, (2, 0, 7, 1), 0)
        assert Coordinator(2, 4).step([[first], [second]]) == [run]
        for rank, request in enumerate((first, second)):
            member = Requester(rank, 2)
            member.submit(request)
            assert member.apply_item(run) == [Insert(0, request, run), Execute(request, run)]

    def test_members_that_differ(self) -> None:
        assert reason(GROUP, replace(GROUP, more=(PART,))) == (
            "group 'group': rank 0 submitted allreduce of 3 tensors, but rank 1 of 2"
        )
        assert reason(GROUP, GROUP, replace(GROUP, more=(PART, TensorType(DType.int8, (1,))))) == (
            "group 'group': rank 0 submitted allreduce with shape (), but rank 2 with shape (1,) (tensor 2 of "
            "the group)"
        )
        assert reason(GROUP, replace(GROUP, dtype=DType.int32)) == (
            "group 'group': rank 0 submitted allreduce with dtype float32, but rank 1 with dtype int32 (tensor 0 of "
            "the group)"
        )
        assert reason(GROUP, replace(GROUP, op=Min)) == (
            "group 'group': rank 0 submitted allreduce with op Sum, but rank 1 with op Min"
        )
        assert reason(replace(GRAD, name="group"), GROUP) == (
            "tensor 'group': rank 0 submitted allreduce of 1 tensors, but rank 1 of 3"
        )


def joined(*ranks: int, size: int = 3) -> tuple[Coordinator, list[StreamItem]]:
    coordinator = Coordinator(size, 4)
    return coordinator, coordinator.step([[JoinData()] if rank in ranks else [] for rank in range(size)])


class TestCoordinatorOfJoins:
    def test_nobody_waits_for_a_rank_that_has_joined(self) -> None:
        coordinator, items = joined(1)
        assert items == [Joined((1,))]
        assert coordinator.step([[GRAD], [], []]) == []
        assert coordinator.step([[], [], [GRAD]]) == [Run(GRAD, (), 0, absent=(1,))]

    def test_what_waited_for_it_runs_when_it_joins(self) -> None:
        coordinator = Coordinator(2, 4)
        coordinator.step([[GRAD], []])
        assert coordinator.step([[], [JoinData()]]) == [Joined((1,)), Run(GRAD, (), 0, absent=(1,))]

    def test_what_it_has_requested_before_has_its_data(self) -> None:
        coordinator = Coordinator(2, 4)
        assert coordinator.step([[], [GRAD, JoinData()]]) == [Joined((1,))]
        assert coordinator.step([[GRAD], []]) == [Run(GRAD, (), 0)]

    def test_all_go_on_when_all_have_joined_and_all_has_run(self) -> None:
        coordinator, _ = joined(2)
        other = replace(GRAD, name="other")
        assert coordinator.step([[GRAD, JoinData()], [other, JoinData()], []]) == [
            *(Joined((0,)), Run(other, (), 0, absent=(0, 2))),
            *(Joined((1,)), Run(GRAD, (), 1, absent=(1, 2))),
            AllJoined(1),
        ]
        assert coordinator.step([[GRAD], [], []]) == [Evict(1)]
        assert coordinator.step([[], [GRAD], [GRAD]]) == [Run(GRAD, (), 1)], "all have data again"

    def test_responses_with_rows_of_every_rank_are_not_kept(self) -> None:
        coordinator = Coordinator(2, 4)
        coordinator.step([[GRAD, WORDS], [GRAD, WORDS]])
        assert coordinator.step([[], [JoinData()]]) == [Evict(1), Joined((1,))]
        assert coordinator.step([[WORDS], []]) == [Run(WORDS, (2, 0), -1, absent=(1,))]
        assert coordinator.step([[JoinData()], []]) == [Joined((0,)), AllJoined(0)]
        assert coordinator.step([[WORDS], [WORDS]]) == [Run(WORDS, (2, 2), 1)]

    def test_a_broadcast_needs_its_root(self) -> None:
        from_1, from_0 = (
            Request(Kind.broadcast, f"from {root}", DType.int8, (), root=root) for root in (1, 0)
        )
        coordinator = Coordinator(2, 4)
        coordinator.step([[from_1, from_0], [from_1, from_0]])
        assert coordinator.step([[], [JoinData()]]) == [Evict(0), Joined((1,))]
        [item] = coordinator.step([[from_1], []])
        assert item == FailTensor(
            "from 1", "tensor 'from 1': the root of the broadcast, rank 1, has joined: it has nothing to send"
        )

    def test_an_exchange_needs_all(self) -> None:
        parts = Request(Kind.alltoall, "parts", DType.int8, (2,))
        coordinator, _ = joined(1, size=2)
        [item] = coordinator.step([[parts], []])
        assert isinstance(item, FailTensor)
        assert item.reason.startswith("tensor 'parts': rank 0 submitted alltoall, but rank 1 has joined")

    def test_the_lowest_rank_that_has_data_is_compared_with(self) -> None:
        coordinator, _ = joined(0)
        [item] = coordinator.step([[], [GRAD], [replace(GRAD, shape=(4,))]])
        assert isinstance(item, FailTensor)
        assert item.reason == (
            "tensor 'grad': rank 1 submitted allreduce with shape (3,), but rank 2 with shape (4,)"
        )

    def test_who_leaves_ends_it_for_all(self) -> None:
        coordinator, _ = joined(1)
        assert coordinator.step([[], [LeaveEngine()], []]) == [Leaving(1)]
        assert coordinator.step([[], [], []]) == [Left(1)]

    def test_nonsense_breaks_the_world(self) -> None:
        with pytest.raises(ProtocolError, match="rank 1 has joined twice"):
            joined(1)[0].step([[], [JoinData()], []])
        with pytest.raises(ProtocolError, match="rank 1 has joined and still requests tensor 'grad'"):
            joined(1)[0].step([[], [GRAD], []])


class TestMemberThatJoins:
    def test_says_so_once_after_its_requests(self) -> None:
        member = Requester(0, 2)
        member.submit(GRAD)
        member.announce_join()
        assert member.takes_back_hits
        assert member.take_outbox() == [GRAD, JoinData()]
        assert not member.takes_back_hits
        assert member.take_outbox() == []

    def test_contributes_until_all_have_joined(self) -> None:
        member = Requester(1, 2)
        member.announce_join()
        member.take_outbox()
        assert member.apply_item(Joined((1,))) == [Joined((1,))]
        run = Run(GRAD, (), 0, absent=(1,))
        assert member.apply_item(run) == [Insert(0, GRAD, run), Contribute(run)]
        gathering = Run(WORDS, (2, 0), -1, absent=(1,))
        assert member.apply_item(gathering) == [Contribute(gathering)]
        with pytest.raises(UsageError, match="this rank has joined; wait until all ranks have joined"):
            member.submit(GRAD)
        with pytest.raises(UsageError, match="has joined already"):
            member.announce_join()
        assert member.apply_item(AllJoined(0)) == [AllJoined(0)]
        assert member.submit(GRAD) == 0

    def test_takes_back_what_others_evict(self) -> None:
        member = Requester(1, 2)
        member.submit(WORDS)
        member.take_outbox()
        run = Run(WORDS, (1, 2), 0)
        member.apply_item(run)
        member.announce_join()
        member.request_again(WORDS)
        assert member.take_outbox() == [WORDS, JoinData()]
        assert member.apply_item(Evict(0)) == [Evicted(0)]

    def test_may_leave(self) -> None:
        member = Requester(0, 2)
        member.announce_join()
        member.announce_leave()
        assert member.take_outbox() == [JoinData(), LeaveEngine()]
        assert member.apply_item(Left(0)) == [Closed(0)]

    def test_refuses_to_be_absent_if_it_is_there(self) -> None:
        member = Requester(1, 2)
        with pytest.raises(ProtocolError, match="rank 1 is absent from tensor 'grad'"):
            member.apply_item(Run(GRAD, (), 0, absent=(1,)))
        member.announce_join()
        member.take_outbox()
        with pytest.raises(ProtocolError, match="is not what rank 1 requested"):
            member.apply_item(Run(WORDS, (2, 1), -1, absent=(1,)))
