"""Which strangers a listener accepts, and which must leave for others."""

from __future__ import annotations

from ronde.net.admission import SILENT_NS, TALKING_NS, Room, Strangers


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
