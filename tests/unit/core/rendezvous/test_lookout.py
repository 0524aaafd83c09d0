"""When a member takes the leader for lost."""

from __future__ import annotations

from ronde.core.rendezvous.effects import Values
from ronde.core.rendezvous.lookout import Lookout
from ronde.core.rendezvous.state import ALIVE, Rules

S = 10**9
RULES = Rules(min_nodes=1, max_nodes=3, heartbeat_ns=5 * S)  # lost after 15 s


def followed(beat: bytes) -> Lookout:
    """One whose leader was looked at and is there."""
    lookout = Lookout(RULES)
    assert lookout.follow(0, "a", 1)
    look(lookout, 0, {"beat/a": beat})
    return lookout


def look(lookout: Lookout, now_ns: int, beat: Values) -> None:
    lookout.see(now_ns, lookout.looked_at, {"alive/a": ALIVE, **beat})


def test_a_leader_that_beats_lives() -> None:
    lookout = followed(b"1")
    for second in range(1, 40):
        assert not lookout.must_judge(second * S)
        if second % 5 == 0:
            lookout.see(second * S, {}, {"beat/a": b"%d" % second})
    assert lookout.loss is None


def test_a_silent_leader_is_looked_at_once_more() -> None:
    lookout = followed(b"1")
    assert not lookout.must_judge(14 * S)
    assert lookout.must_judge(15 * S)
    look(lookout, 15 * S, {"beat/a": b"2"})
    assert lookout.loss is None
    assert lookout.must_judge(30 * S)
    look(lookout, 30 * S, {})
    assert lookout.loss
    assert lookout.loss.is_silent


def test_a_leader_whose_beat_is_gone_is_silent() -> None:
    """It left, deleted its beat, and stopped for good before it let go of what it holds."""
    lookout = followed(b"1")
    lookout.see(S, {}, {"beat/a": None})
    assert lookout.must_judge(15 * S)
    look(lookout, 15 * S, {})
    assert lookout.loss
    assert lookout.loss.is_silent
    assert lookout.loss.last_beat is None


def test_a_leader_may_beat_again_after_its_beat_was_gone() -> None:
    lookout = followed(b"1")
    lookout.see(S, {}, {"beat/a": None})
    lookout.see(9 * S, {}, {"beat/a": b"2"})
    assert not lookout.must_judge(23 * S)
    assert lookout.must_judge(24 * S)
