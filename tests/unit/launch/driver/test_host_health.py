"""Hosts that come, go and fail: which take part, which are set aside and how long, and when the job ends."""

from __future__ import annotations

from ronde.launch.driver.host_health import (
    Effect,
    GiveUp,
    HostEnded,
    HostFailed,
    HostHealth,
    HostNotice,
    HostTimer,
    JobOver,
    Limits,
    Offered,
    SetHostTimer,
    Start,
    StopHost,
)
from ronde.launch.hosts.host_list import Host, parse_hosts
from ronde.rendezvous.membership import HOW_TO_RESUME

S = 10**9


def offered(text: str) -> Offered:
    return Offered(parse_hosts(text) if text else ())


def started(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(effect.host.name, effect.host.slots) for effect in effects if isinstance(effect, Start)]


def test_all_hosts_start_and_the_last_one_gets_what_is_left() -> None:
    assert started(HostHealth(Limits()).step(0, offered("a:2,b:2"))) == [("a", 2), ("b", 2)]
    limited = HostHealth(Limits(max_slots=3))
    assert started(limited.step(0, offered("a:2,b:2,c:2"))) == [("a", 2), ("b", 1)]
    assert limited.step(1, HostEnded("a"))[0] == Start(Host("a", 2))


def test_hosts_are_added_and_removed() -> None:
    health = HostHealth(Limits(max_slots=4, is_changing=True))
    assert started(health.step(0, offered("a:2"))) == [("a", 2)]
    assert started(health.step(1, offered("c:2,a:2,b:2"))) == [("c", 2)]  # a stays, and b finds no room
    effects = health.step(2, offered("c:2,b:2"))
    assert effects[0] == StopHost("a", "a is no longer offered")
    assert started(effects) == [("b", 2)]
    assert not started(health.step(3, HostEnded("a")))
    assert health.running() == (("c", 2), ("b", 2))


def test_a_host_with_another_number_of_slots_starts_again() -> None:
    health = HostHealth(Limits(is_changing=True))
    health.step(0, offered("a:2"))
    effects = health.step(1, offered("a:4"))
    assert effects[0] == StopHost("a", "a offers 4 slots now")
    assert not started(effects)
    assert started(health.step(2, HostEnded("a"))) == [("a", 4)]


def test_a_failing_host_is_set_aside_for_longer_and_longer() -> None:
    health = HostHealth(Limits(cooldown_ns=(10 * S, 35 * S)))
    health.step(0, offered("a:2,b:2"))
    now = 0
    for wait in (10, 20, 35, 35):
        effects = health.step(now, HostFailed("b", "no route"))
        assert effects[0] == HostNotice(f"host b: no route; it is set aside for {wait} s")
        assert effects[1:] == [SetHostTimer(now + wait * S)]
        assert not started(health.step(now + wait * S - 1, HostTimer()))
        now += wait * S
        assert started(health.step(now, HostTimer())) == [("b", 2)]
    now += 35 * S  # it has worked for long
    assert "for 10 s" in str(health.step(now, HostFailed("b", "no route"))[0])
    now += 10 * S
    assert started(health.step(now, HostTimer())) == [("b", 2)]
    now += 34 * S  # and not for so long
    assert "for 20 s" in str(health.step(now, HostFailed("b", "no route"))[0])


def test_a_fixed_job_ends_with_the_first_host_that_fails() -> None:
    health = HostHealth(Limits(min_slots=4))
    health.step(0, offered("a:2,b:2"))
    assert health.step(1, HostFailed("b", "refused"))[-1] == GiveUp("host b: refused")
    assert health.step(2, HostTimer()) == []


def test_a_smaller_job_goes_on_without_the_host_that_failed_for_good() -> None:
    health = HostHealth(Limits(min_slots=2))
    health.step(0, offered("a:2,b:2"))
    assert health.step(1, HostFailed("b", "refused")) == [HostNotice("host b: refused"), SetHostTimer(None)]
    assert health.step(2, HostFailed("a", "lost"))[-1] == GiveUp("host a: lost")


def test_too_few_slots_are_waited_for_while_more_may_come() -> None:
    health = HostHealth(Limits(min_slots=4, is_changing=True, patience_ns=60 * S))
    assert health.step(0, offered("")) == [SetHostTimer(60 * S)]
    assert health.step(10 * S, offered("a:2")) == [Start(Host("a", 2)), SetHostTimer(60 * S)]
    assert health.step(20 * S, offered("a:2,b:2")) == [Start(Host("b", 2)), SetHostTimer(None)]
    assert health.step(30 * S, HostFailed("b", "lost"))[-1] == SetHostTimer(90 * S)
    (gives_up,) = health.step(90 * S, HostTimer())
    assert gives_up == GiveUp(
        "there have been fewer than 4 slots for 60 s: 2 on the hosts that work (a:2); the last failure was host b: lost"
        f". {HOW_TO_RESUME}"
    )


def test_a_job_begins_with_more_slots_than_it_goes_on_with() -> None:
    """As horovodrun does where -np is more than --min-np."""
    health = HostHealth(Limits(min_slots=2, first_slots=4, is_changing=True, patience_ns=60 * S))
    assert health.step(0, offered("")) == [SetHostTimer(60 * S)]
    assert health.step(10 * S, offered("a:2,b:1")) == [SetHostTimer(60 * S)]
    begin = health.step(20 * S, offered("a:2,b:2"))
    assert begin == [Start(Host("a", 2)), Start(Host("b", 2)), SetHostTimer(None)]
    assert health.step(30 * S, HostFailed("b", "lost"))[-1] == SetHostTimer(None)
    assert health.step(40 * S, offered("a:2,c:1"))[:1] == [Start(Host("c", 1))]
    in_vain = HostHealth(Limits(min_slots=2, first_slots=4, is_changing=True, patience_ns=60 * S))
    in_vain.step(0, offered("a:2,b:1"))
    (gives_up,) = in_vain.step(60 * S, HostTimer())
    assert gives_up == GiveUp(
        "there have been fewer than 4 slots for 60 s: 3 on the hosts that work (a:2,b:1)"
    )


def test_a_stopping_host_may_fail_in_peace_and_a_job_that_is_over_starts_nothing() -> None:
    health = HostHealth(Limits(is_changing=True))
    health.step(0, offered("a:2,b:2"))
    health.step(1, offered("a:2"))
    assert health.step(2, HostFailed("b", "killed")) == [SetHostTimer(None)]
    assert health.step(3, JobOver()) == []
    assert health.step(4, HostFailed("a", "ended")) == []
