"""New processes get large states in parts, from all ranks that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ronde
from ronde.comm.communicator import Communicator
from ronde.elastic import state_transfer
from ronde.elastic.state_transfer import LARGE_BYTES, plan_shares, transfer
from ronde.testing import ranks

LARGE = LARGE_BYTES + 77


def payload_of(rank: int, differs: bool) -> dict[str, Any]:
    """A state that is equal on all ranks, but for `differs`."""
    first = np.arange(LARGE, dtype=np.uint8)
    first[5] += differs
    return {"step": 3, "a": first, "small": np.ones(3), "b": [np.arange(LARGE // 4, dtype=np.float32)]}


def receive(senders: tuple[int, ...], receivers: tuple[int, ...], odd: int) -> tuple[bool, list[int]]:
    """Return whether this rank has the right state afterwards, and how many bytes of it each rank has sent to it."""
    ronde.init()
    state_transfer.ROUND_BYTES = LARGE_BYTES  # several rounds
    state_transfer.hosts_of = lambda world: range(world.size)  # as if each rank had a host
    world, sent = ronde.world(), np.zeros(ronde.size(), np.int64)
    alltoall = Communicator.alltoall

    def counted(self: Communicator, array: Any, splits: Any = None, **named: Any) -> Any:
        sent[:] += splits
        return alltoall(self, array, splits, **named)

    Communicator.alltoall = counted  # type: ignore[assignment,method-assign]
    has_state = world.rank in senders
    mine = payload_of(world.rank, world.rank == odd) if has_state else None
    received = transfer(mine, senders, receivers)
    Communicator.alltoall = alltoall  # type: ignore[method-assign]
    expected = payload_of(senders[0], False)
    if world.rank not in receivers:
        is_right = received is None
    else:
        received["a"][0] += 0  # can be written
        is_right = repr(received) == repr(expected) and all(
            (received[name] == expected[name]).all() for name in ("a", "small")
        )
        is_right = is_right and (received["b"][0] == expected["b"][0]).all()
    found = world.allgather(sent).reshape(world.size, world.size)[:, world.rank].tolist()
    ronde.shutdown()
    return bool(is_right), found


def test_survivors_send_parts_and_one_that_differs_sends_none() -> None:
    total = LARGE + LARGE // 4 * 4
    found = ranks.run(receive, 4, (0, 1, 2), (3,), -1)
    assert all(is_right for is_right, _ in found)
    assert sum(found[3][1]) == total
    assert max(found[3][1]) - min(found[3][1][:3]) <= 1
    found = ranks.run(receive, 4, (1, 2, 3), (0,), 2)
    assert all(is_right for is_right, _ in found)
    assert found[0][1][2] == 0
    assert sum(found[0][1]) == total


def receive_altered() -> str:
    """Return the error of a rank to which another one sends a byte that is not that of the state."""
    ronde.init()
    state_transfer.hosts_of = lambda world: range(world.size)
    alltoall = Communicator.alltoall

    def altering(self: Communicator, array: Any, splits: Any = None, **named: Any) -> Any:
        array[self.rank * 10 :][:1] += 1
        return alltoall(self, array, splits, **named)

    Communicator.alltoall = altering  # type: ignore[assignment,method-assign]
    error = ""
    try:
        transfer(payload_of(0, False) if ronde.rank() < 2 else None, (0, 1), (2,))
    except ronde.AuthenticationError as altered:
        error = str(altered)
    Communicator.alltoall = alltoall  # type: ignore[method-assign]
    ronde.shutdown()
    return error


def test_a_state_that_is_altered_in_transit_is_not_unpickled() -> None:
    found = ranks.run(receive_altered, 3)
    assert found[:2] == ["", ""]
    assert "the state from the ranks 0, 1 was altered" in found[2]


@pytest.mark.slow
def test_two_new_processes() -> None:
    found = ranks.run(receive, 4, (0, 2), (1, 3), -1)
    assert [is_right for is_right, _ in found] == [True] * 4
    found = ranks.run(receive, 4, (2,), (0, 1, 3), -1)  # a broadcast
    assert found == [(True, [0] * 4)] * 4


def test_servers_on_the_same_host_come_first() -> None:
    assert plan_shares(3, (0, 1, 2), (0, 0, 1, 2), 10) == {0: slice(0, 4), 1: slice(4, 7), 2: slice(7, 10)}
    assert plan_shares(3, (0, 1, 2), (0, 0, 1, 1), 10) == {2: slice(0, 10)}
