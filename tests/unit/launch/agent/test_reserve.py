"""When workers without a place start."""

from __future__ import annotations

from ronde.launch.agent.reserve import LONGEST_WAIT_NS, SOON_NS, Reserve, SetReserveTimer, StartReserve

S = 10**9


def test_spares_start_at_once_and_are_replaced() -> None:
    reserve = Reserve()
    assert reserve.want(0, 2) == [StartReserve(), StartReserve()]
    for key in (7, 8):
        reserve.note_started(key)
    assert reserve.wake_up(1) == []
    reserve.note_ready(8)
    reserve.note_ready(7)
    assert (reserve.take_ready(), reserve.size) == (8, 1)
    assert reserve.wake_up(2) == [StartReserve()]


def test_nobody_is_ready_without_having_started() -> None:
    reserve = Reserve()
    reserve.note_ready(3)
    assert reserve.take_ready() is None


def test_a_replacement_that_ends_soon_makes_the_next_wait_longer_each_time() -> None:
    reserve = Reserve()
    waits = []
    for key in range(9):
        reserve.note_started(key)
        waits.append(reserve.note_ended(0, key))
    assert waits == [
        S,
        2 * S,
        4 * S,
        8 * S,
        16 * S,
        32 * S,
        LONGEST_WAIT_NS,
        LONGEST_WAIT_NS,
        LONGEST_WAIT_NS,
    ]
    assert reserve.want(5, 1) == [SetReserveTimer(LONGEST_WAIT_NS)]
    assert reserve.wake_up(LONGEST_WAIT_NS) == [StartReserve()]


def test_a_long_life_ends_the_waiting() -> None:
    reserve = Reserve()
    assert reserve.note_lost(0, SOON_NS - 1, took_part=False) == S
    assert reserve.note_lost(2 * S, SOON_NS, took_part=False) == 0
    assert reserve.want(2 * S, 1) == [StartReserve()]


def test_workers_that_took_part_are_replaced_at_once_however_soon_they_are_lost() -> None:
    reserve = Reserve()
    for now_ns in range(5):
        assert reserve.note_lost(now_ns, 1, took_part=True) == 0
    assert reserve.want(5, 1) == [StartReserve()]
