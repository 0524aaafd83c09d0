"""When a member counts the leader as lost."""

from __future__ import annotations

from ronde.rendezvous.effects import Values
from ronde.rendezvous.failure_detectors import LeaderDetector, StoreSilence
from ronde.rendezvous.membership import Rules
from ronde.rendezvous.state import ALIVE

S = 10**9
RULES = Rules(min_nodes=1, max_nodes=3, heartbeat_ns=5 * S)  # lost after 15 s


def followed(heartbeat: bytes) -> LeaderDetector:
    """One whose leader was looked at and is there."""
    detector = LeaderDetector(RULES)
    assert detector.follow_leader(0, "a", 1)
    look(detector, 0, {"heartbeat/a": heartbeat})
    return detector


def look(detector: LeaderDetector, now_ns: int, heartbeat: Values) -> None:
    detector.note_values(now_ns, detector.keys_to_read, {"alive/a": ALIVE, **heartbeat})


def test_a_leader_with_heartbeats_lives() -> None:
    detector = followed(b"1")
    for second in range(1, 40):
        assert not detector.must_check_leader(second * S)
        if second % 5 == 0:
            detector.note_values(second * S, {}, {"heartbeat/a": b"%d" % second})
    assert detector.loss is None


def test_a_silent_leader_is_looked_at_once_more() -> None:
    detector = followed(b"1")
    assert not detector.must_check_leader(14 * S)
    assert detector.must_check_leader(15 * S)
    look(detector, 15 * S, {"heartbeat/a": b"2"})
    assert detector.loss is None
    assert detector.must_check_leader(30 * S)
    look(detector, 30 * S, {})
    assert detector.loss
    assert detector.loss.is_silent


def test_a_leader_whose_heartbeat_is_gone_is_silent() -> None:
    """It left, deleted its heartbeat, and stopped for good before it gave up its held keys."""
    detector = followed(b"1")
    detector.note_values(S, {}, {"heartbeat/a": None})
    assert detector.must_check_leader(15 * S)
    look(detector, 15 * S, {})
    assert detector.loss
    assert detector.loss.is_silent
    assert detector.loss.last_heartbeat is None


def test_a_leader_may_send_heartbeats_again_after_one_was_gone() -> None:
    detector = followed(b"1")
    detector.note_values(S, {}, {"heartbeat/a": None})
    detector.note_values(9 * S, {}, {"heartbeat/a": b"2"})
    assert not detector.must_check_leader(23 * S)
    assert detector.must_check_leader(24 * S)


def test_what_a_node_knows_may_be_old_after_a_long_silence_of_the_store() -> None:
    rules = Rules()
    silence = StoreSilence(rules)
    for silent_ns in (rules.silence_ns - 1, rules.silence_ns):
        silence.note_answer(0)
        silence.note_return(silent_ns)
        silence.note_answer(silent_ns)
        assert silence.has_just_woken(silent_ns + 1) == (silent_ns == rules.silence_ns)
    assert not silence.has_just_woken(2 * rules.silence_ns)
