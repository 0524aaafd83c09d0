"""A member: which job it ends while it waits, what it concludes from a job's end, and its messages to the user."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ronde.rendezvous.member import Member, timeout_message
from ronde.rendezvous.membership import Budget, JobClosed, Node, Rules
from ronde.rendezvous.state import JobPhase, JobState, JobTerms, RosterKey

RULES = Rules(min_nodes=2, max_nodes=2)


def waiting_member() -> Member:
    member = Member(RULES)
    member.join(0, Node("x", "host-x", "10.0.0.1", 1, "tcp:10.0.0.1:9", 1024), Budget())
    return member


def job(number: int, phase: JobPhase) -> JobState:
    begun = number if phase == JobPhase.RUNNING else number - 1
    return JobState(
        JobTerms.of(RULES, Budget()), "a", phase=phase, number=number, roster=RosterKey(1, begun, 1)
    )


def closes(member: Member, state: JobState) -> bool:
    closed = member.closing_state(state)
    assert (closed is not None) == member.is_ending
    return closed is not None and closed.phase == JobPhase.CLOSED and closed.reason == "host-x: interrupted"


def test_who_has_just_come_ends_the_job_whatever_that_does() -> None:
    """Nobody knew of it, so nobody has taken it for dead."""
    member = waiting_member()
    member.end_job("interrupted")
    assert closes(member, job(7, JobPhase.RUNNING))


@pytest.mark.parametrize("phase", [JobPhase.FORMING, JobPhase.RUNNING])
def test_the_round_that_begins_meanwhile_saves_nobody(phase: JobPhase) -> None:
    member = waiting_member()
    member.note_state(job(3, phase), ())
    member.end_job("interrupted")
    assert closes(member, job(3, JobPhase.RUNNING))
    assert closes(member, job(4, JobPhase.FORMING))
    assert closes(member, job(4, JobPhase.RUNNING))


def test_who_was_frozen_while_it_waited_ends_no_job_that_went_on() -> None:
    member = waiting_member()
    member.note_state(job(3, JobPhase.FORMING))
    member.end_job("interrupted")
    assert not closes(member, job(5, JobPhase.FORMING))
    assert not closes(member, job(4, JobPhase.RUNNING)), "it has given that up"


@pytest.mark.parametrize(
    ("when_it_came", "at_the_end", "was_full"), [(2, 2, True), (2, 1, False), (1, 1, False)]
)
def test_a_job_was_full_if_all_its_places_were_taken_by_living_nodes(
    when_it_came: int, at_the_end: int, was_full: bool
) -> None:
    """The node that replaces one whose workers had succeeded belongs to this job."""
    member = waiting_member()
    running = replace(job(0, JobPhase.RUNNING), largest=2)
    member.note_state(replace(running, alive=when_it_came), ())
    member.note_state(replace(running, phase=JobPhase.COMPLETED, version=1, alive=at_the_end))
    (closed,) = (event for event in member.events if isinstance(event, JobClosed))
    assert (closed.completed, closed.was_full) == (True, was_full)


def test_a_node_that_waits_for_slots_does_not_count_nodes() -> None:
    rules = Rules(min_nodes=1, max_nodes=8, min_slots=4)
    state = JobState(JobTerms.of(rules, Budget()), "a", joined=1)
    said = timeout_message(rules, state, False)
    assert said.startswith("waited 600 s for 4 slots, and the node here has fewer; add others")


def test_a_node_that_waits_for_its_first_round_names_the_option_that_limits_it() -> None:
    rules = Rules(min_nodes=2, max_nodes=2, first_join_timeout_ns=5 * 10**9)
    state = JobState(JobTerms.of(rules, Budget()), "a", joined=1)
    said = timeout_message(rules, state, False, is_new=True)
    assert said.startswith("waited 5 s for all nodes")
    assert said.endswith("or wait longer (--start-timeout)")
    later = timeout_message(rules, state, False)
    assert later.startswith("waited 600 s for all nodes")
    assert (
        "or wait longer (--elastic-timeout SECONDS). To resume, start the job again with the same command"
        in later
    )
    assert "To resume" in timeout_message(rules, state, has_moved=True)
