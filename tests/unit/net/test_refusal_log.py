"""The lines about refused connections."""

from __future__ import annotations

from ronde.net.refusal_log import INTERVAL_NS, MOST_REASONS, Refusals

SECOND = 10**9


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
