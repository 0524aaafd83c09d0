"""The coordinator's warnings when ranks call operations without names at different lines."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.engine.messages import CallSite, FailTensor, LeaveEngine, Message, Request, Run
from ronde.engine.negotiation import Coordinator, Requester
from ronde.types import DType, Kind


def unnamed(number: int, *shape: int) -> Request:
    return Request(Kind.allreduce, f"allreduce.noname.{number}", DType.float32, shape or (3,))


def call(number: int, line: int, *shape: int) -> list[Message]:
    """The messages of a rank that calls an operation at this line."""
    request = unnamed(number, *shape)
    return [CallSite(request.name, f"train.py:{line}"), request]


def warnings(*rounds: Sequence[Sequence[Message]], names: Sequence[int] | None = None) -> list[str]:
    """The warnings of a coordinator after rounds with these messages of each rank."""
    coordinator = Coordinator(len(rounds[0]), 100, names)
    for outboxes in rounds:
        coordinator.step(outboxes)
    return coordinator.take_warnings()


def test_a_swap_is_one_warning_with_both_lines() -> None:
    [warning] = warnings([[*call(0, 12), *call(1, 15)], [*call(0, 15), *call(1, 12)]])
    assert warning == (
        "unnamed operation 'allreduce.noname.0' is called at train.py:12 on rank 0 and at train.py:15 on rank 1: if "
        "these lines pass different arrays, the result combines them and is wrong; give the operations names (name=...)"
    )


def test_equal_lines_are_none_and_so_are_requests_without_a_line() -> None:
    assert warnings([call(0, 12), call(0, 12)]) == []
    assert warnings([call(0, 12), [unnamed(0)]]) == []


def test_ranks_may_come_in_different_rounds_and_have_other_names() -> None:
    [warning] = warnings([[], call(0, 15), []], [call(0, 12), [], call(0, 15)], names=[4, 6, 8])
    assert "train.py:12 on rank 4 and at train.py:15 on rank 6:" in warning


def test_a_line_counts_for_one_operation_only() -> None:
    assert warnings([call(0, 12), call(0, 12)], [call(0, 15), call(0, 15)]) == []


def test_what_fails_is_an_error_and_no_warning() -> None:
    coordinator = Coordinator(2, 4)
    [item] = coordinator.step([call(0, 12, 3), call(0, 15, 4)])
    assert isinstance(item, FailTensor)
    assert coordinator.take_warnings() == []
    coordinator.step([call(0, 12), call(0, 12)])
    assert coordinator.take_warnings() == []


def test_after_eight_pairs_it_is_silent() -> None:
    rounds = [[call(number, number), call(number, 100 + number)] for number in range(20)]
    assert len(warnings(*rounds)) == 8


def test_a_member_sends_the_line_with_a_miss_only() -> None:
    member = Requester(0, 1)
    assert member.submit(unnamed(0), "train.py:12") is None
    assert member.take_outbox() == call(0, 12)
    member.apply_item(Run(unnamed(0), (), 0))
    assert member.submit(unnamed(0), "train.py:15") == 0
    member.announce_leave()
    assert member.take_outbox() == [LeaveEngine()]
