"""Strangers at a listener: which ones it accepts, what it logs of them, and when it tries a failing `accept` again."""

from __future__ import annotations

from ronde.net.admission import (
    FIRST_PAUSE_NS,
    GIVE_UP_NS,
    INTERVAL_NS,
    LONGEST_PAUSE_NS,
    MOST_REASONS,
    SILENT_NS,
    TALKING_NS,
    AcceptFailures,
    Refusals,
    Room,
    Strangers,
    Verdict,
)

SECOND, HOUR_NS = 10**9, 3600 * 10**9


def crowd(*sources: str) -> Strangers[str]:
    """As many strangers as there may be, one for each nanosecond."""
    strangers: Strangers[str] = Strangers(len(sources))
    for number, source in enumerate(sources):
        strangers.add_stranger(f"{source}{number}", source, number)
    return strangers


def test_there_is_room_for_some() -> None:
    strangers: Strangers[str] = Strangers(2)
    strangers.add_stranger("a", "", 0)
    assert strangers.find_room(0) == Room()
    strangers.add_stranger("b", "", 0)
    assert strangers.find_room(0) == Room(wait_until_ns=SILENT_NS)
    strangers.remove_stranger("a")
    assert strangers.find_room(0) == Room()


def test_the_oldest_silent_one_of_the_largest_source_leaves_first() -> None:
    strangers = crowd("x", "a", "a", "b")
    assert strangers.find_room(SILENT_NS - 1) == Room(wait_until_ns=SILENT_NS + 1)
    assert strangers.find_room(SILENT_NS + 1) == Room(leaver="a1")
    strangers.note_hello("a1", SILENT_NS)
    assert strangers.find_room(SILENT_NS + 2) == Room(leaver="a2")


def test_in_a_shortage_one_comes_in_the_place_of_another() -> None:
    strangers: Strangers[str] = Strangers(100)
    strangers.add_stranger("a", "", 0)
    assert strangers.find_room(SILENT_NS - 1, is_short=True) == Room(wait_until_ns=SILENT_NS)
    assert strangers.find_room(SILENT_NS, is_short=True) == Room(leaver="a")


def test_a_stranger_with_a_hello_has_more_time() -> None:
    strangers = crowd("a", "a")
    for name in ("a0", "a1"):
        strangers.note_hello(name, 10)
    assert strangers.find_room(SILENT_NS + 10) == Room(wait_until_ns=TALKING_NS + 10)
    assert strangers.find_room(TALKING_NS + 10) == Room(leaver="a0")


def test_one_line_for_a_reason_within_ten_seconds_with_a_count() -> None:
    refusals = Refusals()
    assert refusals.note_refusal("wrong key", "10.0.0.1:5", 0) == [
        "turned away a connection from 10.0.0.1:5: wrong key"
    ]
    for number in range(100_000):
        assert refusals.note_refusal("wrong key", f"10.0.0.2:{number}", number * 1000) == []
    assert refusals.note_refusal("too slow", "10.0.0.3:6", SECOND) == [
        "turned away a connection from 10.0.0.3:6: too slow"
    ]
    assert refusals.note_refusal("too slow", "10.0.0.3:7", INTERVAL_NS) == [
        "turned away 100,000 more connections, the last from 10.0.0.2:99999: wrong key"
    ]
    assert refusals.final_lines() == ["turned away a connection from 10.0.0.3:7: too slow"]
    assert refusals.final_lines() == []


def test_strangers_do_not_choose_how_many_reasons_there_are() -> None:
    refusals = Refusals()
    lines = [
        line
        for number in range(10_000)
        for line in refusals.note_refusal(f"version {number}", "10.0.0.1:5", number)
    ]
    assert len(lines) == MOST_REASONS + 1
    assert lines[-1].endswith(": other reasons")
    later = refusals.note_refusal("version 1", "10.0.0.1:5", INTERVAL_NS + 10_000)
    assert later[0] == "turned away 9,991 more connections, the last from 10.0.0.1:5: other reasons"


def test_the_summary_is_about_the_last_one() -> None:
    refusals = Refusals()
    assert refusals.summary == ""
    refusals.note_refusal("wrong key", "10.0.0.1:5", 0)
    refusals.note_refusal("wrong key", "10.0.0.2:6", 1)
    assert refusals.summary == "turned away a connection from 10.0.0.2:6: wrong key"


def tries(failures: AcceptFailures, is_shortage: bool, until_ns: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    now_ns = 1
    while now_ns < until_ns and not (verdicts and verdicts[-1].is_final):
        verdicts.append(failures.note_failure(is_shortage, now_ns))
        now_ns += verdicts[-1].pause_ns
    return verdicts


def test_a_shortage_is_waited_for_with_growing_pauses_and_reported_once() -> None:
    verdicts = tries(AcceptFailures(), True, HOUR_NS)
    assert not any(verdict.is_final for verdict in verdicts)
    assert [verdict.is_new for verdict in verdicts] == [True] + [False] * (len(verdicts) - 1)
    assert verdicts[0].pause_ns == FIRST_PAUSE_NS
    assert max(verdict.pause_ns for verdict in verdicts) == LONGEST_PAUSE_NS


def test_another_failure_that_lasts_is_final() -> None:
    verdicts = tries(AcceptFailures(), False, HOUR_NS)
    assert verdicts[-1].is_final
    assert GIVE_UP_NS <= sum(verdict.pause_ns for verdict in verdicts[:-1]) <= GIVE_UP_NS + LONGEST_PAUSE_NS


def test_a_success_begins_anew() -> None:
    failures = AcceptFailures()
    failures.note_failure(False, 1)
    failures.note_success()
    assert failures.note_failure(False, HOUR_NS) == Verdict(FIRST_PAUSE_NS, True, False)
