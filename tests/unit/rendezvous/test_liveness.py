"""How long a node may run workers, and how long the others wait for those of a lost one."""

from __future__ import annotations

from tests.unit.rendezvous.test_leader import BOOM, LeaderWithInbox, S, running

from ronde.rendezvous.liveness import WorkerLease
from ronde.rendezvous.membership import Rules
from ronde.rendezvous.state import FailureReport, Heartbeat, LeaveNotice

RULES = Rules(2, 3, last_call_ns=S, heartbeat_ns=5 * S, missing_heartbeats=3)


def test_a_lease_counts_from_when_the_confirmed_heartbeat_was_sent() -> None:
    lease = WorkerLease(RULES)
    assert not lease.has_ended(0)
    lease.begin_lease(0)
    lease.note_sent(5 * S, b"1")
    lease.note_sent(10 * S, b"2")
    assert lease.has_ended(15 * S)
    lease.note_confirmed(b"1")  # however long that took
    assert lease.ends_ns == 20 * S
    lease.note_confirmed(b"2")
    lease.note_confirmed(b"1")  # again, or late
    assert not lease.has_ended(25 * S - 1)
    assert lease.has_ended(25 * S)


def test_only_a_recent_heartbeat_can_renew_a_lease() -> None:
    lease = WorkerLease(RULES)
    lease.begin_lease(0)
    assert not lease.is_being_renewed(0)
    lease.note_sent(5 * S, b"1")
    assert lease.is_being_renewed(19 * S)
    assert not lease.is_being_renewed(20 * S)


def heartbeat(inbox: LeaderWithInbox, second: float, **counts: int) -> None:
    """The leader reads new heartbeats of these nodes."""
    inbox.at(second)
    inbox.leader.note_heartbeats(
        inbox.now_ns, {name: Heartbeat(count, -1) for name, count in counts.items()}, counts
    )


def test_a_round_waits_until_the_lease_of_a_lost_node_has_run_out() -> None:
    inbox = running("abc", RULES)
    heartbeat(inbox, 4, a=1, b=1, c=1)
    inbox.at(10).leader.lose_nodes(inbox.now_ns, ["c"], "lost the connection", may_work=True)
    inbox.join("a", "b", after=0)
    assert inbox.at(23.9).is_forming  # c was heard 4 s after the start: 15 s of silence, and a heartbeat
    assert inbox.leader.wake_ns <= 24 * S
    assert inbox.at(24).roster == "ab"


def lost_while_forming() -> LeaderWithInbox:
    """`c` sends its last heartbeat at 4 s, freezes, and is lost after the round has ended for another reason."""
    inbox = running("abc", RULES)
    heartbeat(inbox, 4, a=1, b=1, c=1)
    inbox.at(8).say(FailureReport(0, "a", 0, BOOM))
    inbox.join("a", "b", after=0)
    inbox.at(17).leader.lose_nodes(inbox.now_ns, ["c"], "was silent for 15 s", may_work=True)
    return inbox


def test_a_round_waits_again_when_a_lost_node_renews_its_lease() -> None:
    inbox = lost_while_forming()
    heartbeat(inbox, 18, c=2)
    assert inbox.at(37.9).is_forming
    assert inbox.leader.wake_ns <= 38 * S
    assert inbox.at(38).roster == "ab"


def test_a_lost_node_that_renews_its_lease_and_does_not_join_is_left_behind() -> None:
    inbox = lost_while_forming()
    for second in range(18, 53, 5):
        assert inbox.is_forming
        heartbeat(inbox, second, c=second)
    assert inbox.at(52.9).is_forming  # 20 s after the heartbeat at 33 s, the last one that counts
    assert inbox.at(53).roster == "ab"


def test_a_heartbeat_does_not_change_when_the_workers_of_a_leaving_node_must_have_ended() -> None:
    inbox = running("abc", RULES).at(10)
    inbox.say(LeaveNotice(0, "c", "host-c", "interrupted", 3 * S))
    inbox.join("a", "b", after=0)
    heartbeat(inbox, 12, c=1)
    assert inbox.at(17.9).is_forming
    assert inbox.at(18).roster == "ab"


def test_no_round_waits_for_a_node_without_workers() -> None:
    def lost() -> LeaderWithInbox:
        inbox = running("abc", RULES).at(10)
        inbox.leader.lose_nodes(inbox.now_ns, ["c"], "lost the connection", may_work=True)
        inbox.join("a", "b", after=0)
        assert inbox.is_forming
        return inbox

    ended = lost()
    ended.leader.note_agents_ended(ended.now_ns, ["c"], "its machine says so")
    assert ended.roster == "ab"
    assert lost().join("c", after=0).roster == "abc"

    left = running("abc", RULES).at(10)
    left.say(LeaveNotice(0, "c", "host-c", "interrupted"))
    assert left.join("a", "b", after=0).roster == "ab"


def test_a_node_that_waits_for_the_round_has_no_workers_either() -> None:
    inbox = running("abc", RULES).at(10)
    inbox.leader.lose_nodes(inbox.now_ns, ["b"], "left")
    inbox.join("c", after=0)
    inbox.leader.lose_nodes(inbox.now_ns, ["c"], "lost the connection", may_work=True)
    assert inbox.join("a", "d", after=0).at(11).roster == "ad"
