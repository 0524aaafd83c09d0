"""The encoding of the state, its roster and messages; and which of two states counts in a store that lost its data."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest

from ronde.errors import ProtocolError, VersionError
from ronde.rendezvous.membership import Budget, Failure, Node, NodesLost, NodesWaiting, Rules, WorkerFailed
from ronde.rendezvous.state import (
    PART_NODES,
    FailureReport,
    Heartbeat,
    JobPhase,
    JobState,
    JobTerms,
    JoinRequest,
    LeaveNotice,
    Message,
    Refused,
    RosterKey,
    SuccessReport,
    decode,
    decode_roster,
    decode_state,
    encode,
    encode_roster,
)

RUNNING = JobState(
    JobTerms.of(Rules(1, 4), Budget(0)), "a", term=5, version=18, phase=JobPhase.RUNNING, number=5
)
ENDED = replace(RUNNING, version=19, phase=JobPhase.FORMING, number=6)


def test_a_frozen_node_does_not_undo_the_end_of_a_round_by_writing_often() -> None:
    """The leader was lost with the store, and the one that was frozen is the first to find the new one."""
    written_again = replace(RUNNING.restored("b", None), version=30)
    assert ENDED.is_newer(written_again)
    assert not written_again.is_newer(ENDED)


def test_a_round_that_runs_counts_rather_than_a_later_one_that_only_forms() -> None:
    """A node that was cut off while round 5 formed has asked for round 6 in a store that had lost its data."""
    running = replace(RUNNING, roster=RosterKey(5, 5, 1))
    forming = replace(RUNNING, phase=JobPhase.FORMING, roster=RosterKey(4, 4, 1)).restored("b", None)
    forming = replace(forming, version=30)
    assert forming.number == 6
    assert running.is_newer(forming)
    assert not forming.is_newer(running)


def test_of_one_round_the_later_version_counts() -> None:
    later = replace(ENDED, version=20, waiting=1)
    assert later.is_newer(ENDED)
    assert not ENDED.is_newer(later)


def test_a_later_version_that_closes_the_job_counts() -> None:
    closed = replace(ENDED, version=20, phase=JobPhase.CLOSED)
    assert closed.is_newer(ENDED)
    assert not ENDED.is_newer(closed)


def test_of_two_stores_the_one_with_the_later_round_counts() -> None:
    """The numbers of versions in two stores say nothing about each other, nor does a round that only forms."""
    fifth = replace(RUNNING, roster=RosterKey(4, 5, 1), version=2)
    third = replace(ENDED, roster=RosterKey(2, 3, 1), number=9, version=30)
    assert fifth.is_newer(third)
    assert not third.is_newer(fifth)
    assert third.is_newer(replace(third, roster=None, version=31))


def test_a_job_that_has_ended_stays_ended_unless_a_later_round_has_begun() -> None:
    """A node closes the job in a store that has lost its data. Another one knows that it was lost."""
    closed = replace(RUNNING, roster=RosterKey(5, 5, 1), phase=JobPhase.CLOSED)
    forming = replace(ENDED, roster=RosterKey(5, 5, 1), version=40)
    assert closed.is_newer(forming)
    assert not forming.is_newer(closed)
    assert replace(RUNNING, roster=RosterKey(6, 6, 1), number=6).is_newer(closed)


def test_a_restored_state_is_later_than_both() -> None:
    found = replace(ENDED, term=9, version=3)
    for old, term, version in ((None, 6, 19), (found, 10, 19), (replace(found, version=40), 10, 41)):
        restored = RUNNING.restored("b", old)
        assert (restored.leader, restored.term, restored.version) == ("b", term, version)


NODE = Node("a", "höst", "::1", 8, "tcp:[::1]:1", 29500, "trainer", 3, host_id="f00d")
FAILURE = Failure(1, 0, "h", 42, -9, "killed\n", "why", True)
TERMS = JobTerms.of(Rules(1, 4), Budget(2, -1))


@pytest.mark.parametrize(
    "word",
    [
        JoinRequest(1, NODE, -1),
        FailureReport(2, "a", 7, FAILURE),
        SuccessReport(3, "a", 7),
        LeaveNotice(4, "a", "h", ""),
        Heartbeat(6, -1),
        Heartbeat(7, 2, awaits_exit=True),
        JobState(TERMS, "a"),
        JobState(TERMS, "a", 2, 9, JobPhase.RUNNING, 3, RosterKey(2, 3, 1), 1, 2, WorkerFailed(FAILURE), 4),
        JobState(TERMS, "a", cause=NodesLost((NODE, NODE), "gone"), spares=("x", "y")),
        JobState(TERMS, "a", cause=NodesWaiting(2), refused=(Refused("b", "no"),), failure=FAILURE),
    ],
)
def test_what_is_written_is_read(word: JobState | Heartbeat | Message) -> None:
    assert decode(encode(word), type(word)) == word


def test_a_roster_is_cut_into_parts() -> None:
    nodes = tuple(Node(f"{i}", f"node{i}", "10.0.0.1", 8, "tcp:10.0.0.1:1", 1) for i in range(PART_NODES + 1))
    parts = encode_roster(nodes)
    assert len(parts) == 2
    assert max(map(len, parts)) < 1 << 20
    assert decode_roster(tuple(parts)) == nodes


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"ronde",
        b"ronde 4",
        b"ronde 4 ",
        b'ronde two ["Heartbeat",1,0]',
        b'["Heartbeat",1,0]',
        b'ronde 4 ["Heartbeat"]',
        b'ronde 4 ["JoinRequest"]',
        b'ronde 4 ["Heartbeat","1",0]',
        b'ronde 4 ["Heartbeat",true,0]',
        b'ronde 4 ["Heartbeat",1.0,0]',
        b'ronde 4 ["Heartbeat",1,0,0]',
        b'ronde 4 ["Heartbeat",1]',
        b'ronde 4 ["Heartbeat",[1,0]]',
        b'ronde 4 {"Heartbeat":[1,0]}',
        b'ronde 4 ["SuccessReport",1,"a",1]',
        b'ronde 4 ["Node",1,"a",1]',
        b'ronde 4 ["Heartbeat",1,0],["Heartbeat",1,0]',
        b"ronde 4 " + b"[" * 100_000,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, Heartbeat, JoinRequest)


def test_wrong_contents_of_a_state_are_refused() -> None:
    good = encode(JobState(TERMS, "a"))
    head = b"ronde 4 "
    fields = json.loads(good.removeprefix(head))
    assert decode_state(head + json.dumps(fields).encode()) == JobState(TERMS, "a")
    for field, value in (
        ("phase", "asleep"),
        ("cause", ["Node", "a"]),
        ("spares", "a"),
        ("roster", 1),
        ("terms", None),
    ):
        index = 1 + JobState.__match_args__.index(field)
        bad = [*fields[:index], value, *fields[index + 1 :]]
        with pytest.raises(ProtocolError):
            decode_state(head + json.dumps(bad).encode())


def test_another_version_says_so() -> None:
    with pytest.raises(VersionError, match="version 5"):
        decode(b'ronde 5 ["Anything"]', Heartbeat)
    with pytest.raises(VersionError, match="version 5"):
        decode_roster((zlib.compress(b"ronde 5 []"),))


@pytest.mark.parametrize("roster", [b"", b"[]", b"ronde 4 null", b"ronde 4 [1]", b'ronde 4 [["a"]]'])
def test_a_broken_roster_is_refused(roster: bytes) -> None:
    for part in (roster, zlib.compress(roster)):
        with pytest.raises(ProtocolError):
            decode_roster((part,))
