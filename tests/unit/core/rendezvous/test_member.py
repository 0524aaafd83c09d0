"""Which job a node that waits for a round ends, when it is told to end it."""

from __future__ import annotations

import pytest

from ronde.core.rendezvous.member import Member
from ronde.core.rendezvous.state import Phase, RosterKey, Rules, State, Terms
from ronde.core.round import Budget, Node

RULES = Rules(min_nodes=2, max_nodes=2)


def waiting_member() -> Member:
    member = Member(RULES)
    member.join(0, Node("x", "host-x", "10.0.0.1", 1, "tcp:10.0.0.1:9", 1024), Budget())
    return member


def job(number: int, phase: Phase) -> State:
    begun = number if phase == Phase.RUNNING else number - 1
    return State(Terms.of(RULES, Budget()), "a", phase=phase, number=number, roster=RosterKey(1, begun, 1))


def closes(member: Member, state: State) -> bool:
    closed = member.closed(state)
    assert (closed is not None) == member.is_ending
    return closed is not None and closed.phase == Phase.CLOSED and closed.reason == "host-x: interrupted"


def test_who_has_just_come_ends_the_job_whatever_that_does() -> None:
    """Nobody knew of it, so nobody has taken it for dead."""
    member = waiting_member()
    member.end_job("interrupted")
    assert closes(member, job(7, Phase.RUNNING))


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.RUNNING])
def test_the_round_that_begins_meanwhile_saves_nobody(phase: Phase) -> None:
    member = waiting_member()
    member.see(job(3, phase), ())
    member.end_job("interrupted")
    assert closes(member, job(3, Phase.RUNNING))
    assert closes(member, job(4, Phase.FORMING))
    assert closes(member, job(4, Phase.RUNNING))


def test_who_was_frozen_while_it_waited_ends_no_job_that_went_on() -> None:
    member = waiting_member()
    member.see(job(3, Phase.FORMING))
    member.end_job("interrupted")
    assert not closes(member, job(5, Phase.FORMING))
    assert not closes(member, job(4, Phase.RUNNING)), "it has given that up"
