"""The leader alone: when rounds begin and end, what they cost, which nodes are lost, and which ranks nodes get."""

from __future__ import annotations

from dataclasses import replace

from ronde.rendezvous.leader import STRAGGLER_NS, Leader, assign_group_ranks, host_order, put_survivors_first
from ronde.rendezvous.membership import (
    Budget,
    Failure,
    Node,
    NodesLost,
    NodesWaiting,
    Rules,
    WorkerFailed,
    node_names,
)
from ronde.rendezvous.state import (
    FailureReport,
    Heartbeat,
    JobPhase,
    JobState,
    JobTerms,
    JoinRequest,
    LeaveNotice,
    Message,
    SuccessReport,
)

S = 10**9
BOOM = Failure(0, 0, "h", 1, 1, "boom")


class LeaderWithInbox:
    """A leader, with nodes that talk to it."""

    def __init__(self, rules: Rules, budget: Budget = Budget(1)) -> None:  # noqa: B008
        self.now_ns = 0
        self.seq = 0
        self.leader = Leader(rules, JobState(JobTerms.of(rules, budget), "a"), (), 0)

    @property
    def state(self) -> JobState:
        return self.leader.state

    def at(self, seconds: float) -> LeaderWithInbox:
        self.now_ns = int(seconds * S)
        self.leader.tick(self.now_ns)
        return self

    def say(self, message: Message) -> None:
        self.seq += 1
        self.leader.handle_message(self.now_ns, replace(message, seq=self.seq))

    def join(self, *names: str, after: int = -1, wish: int = -1) -> LeaderWithInbox:
        for name in names:
            self.say(JoinRequest(0, Node(name, f"host-{name}", "", 1, "", 1, wish=wish), after))
        return self

    def lose(self, *names: str) -> LeaderWithInbox:
        self.leader.lose_nodes(self.now_ns, names, "lost the connection to the others")
        return self

    @property
    def roster(self) -> str:
        assert self.state.phase == JobPhase.RUNNING
        return "".join(node.id for node in self.leader.roster)

    @property
    def is_forming(self) -> bool:
        return self.state.phase == JobPhase.FORMING


def running(names: str, rules: Rules, budget: Budget = Budget(1)) -> LeaderWithInbox:  # noqa: B008
    inbox = LeaderWithInbox(rules, budget).join(*names)
    if inbox.is_forming:
        inbox.at(rules.last_call_ns / S)
    assert inbox.roster == names
    return inbox


def test_a_full_world_begins_at_once() -> None:
    assert LeaderWithInbox(Rules(2, 3)).join("a", "b", "c").roster == "abc"


def test_the_last_call_begins_with_the_minimum_and_is_not_prolonged() -> None:
    inbox = LeaderWithInbox(Rules(2, 4)).at(5).join("a", "b").at(20).join("c").at(34.9)
    assert inbox.is_forming
    assert inbox.at(35).roster == "abc"


def test_too_few_wait_and_then_there_is_a_last_call() -> None:
    inbox = running("abc", Rules(2, 3)).lose("b", "c").join("a", after=0)
    assert inbox.at(100).is_forming
    inbox.at(101).join("x", after=0)
    assert inbox.at(130.9).is_forming
    assert inbox.at(131).roster == "ax"


def test_a_shrinking_world_does_not_wait() -> None:
    inbox = running("abc", Rules(1, 5)).at(50).lose("b").join("c", after=0)
    assert inbox.is_forming
    assert inbox.join("a", after=0).roster == "ac"
    assert inbox.state.changes == 1
    assert isinstance(inbox.state.cause, NodesLost)
    assert inbox.state.cause.reason == "host-b lost the connection to the others"


def test_a_survivor_that_does_not_join_is_left_behind() -> None:
    inbox = running("ab", Rules(1, 2)).at(50).lose("x")
    inbox.say(FailureReport(0, "a", 0, BOOM))
    inbox.join("a", after=0).at(50 + STRAGGLER_NS / S - 1)
    assert inbox.is_forming
    assert inbox.at(50 + STRAGGLER_NS / S).roster == "a"


def test_no_survivor_is_left_behind_while_its_workers_may_still_be_ending() -> None:
    inbox = running("ab", Rules(1, 2, heartbeat_ns=5 * S, longest_end_ns=70 * S)).at(50)
    inbox.say(FailureReport(0, "a", 0, BOOM))
    inbox.join("a", after=0).at(50 + 74.9)
    assert inbox.is_forming
    assert inbox.at(50 + 75).roster == "a"


def test_a_node_may_take_back_that_its_workers_have_succeeded() -> None:
    """Another node's rank waits for a worker that has ended. Its node then leaves, where nodes can be replaced."""
    inbox = running("abc", Rules(1, 3, gives_way=True), Budget(0)).at(50)
    inbox.say(SuccessReport(0, "b", 0))
    inbox.say(FailureReport(0, "b", 0, BOOM))
    assert inbox.is_forming
    assert isinstance(inbox.state.cause, NodesLost)
    assert [node.id for node in inbox.state.cause.nodes] == ["b"]


def test_a_late_node_comes_in_after_the_last_call_or_when_the_world_is_full() -> None:
    inbox = running("ab", Rules(1, 4)).at(50).join("c", after=0)
    assert inbox.roster == "ab"
    assert inbox.at(79).roster == "ab"
    inbox.at(80)
    assert inbox.state.cause == NodesWaiting(1)
    assert inbox.join("a", "b", after=0).roster == "abc"
    inbox.join("d", after=1)
    assert inbox.state.cause == NodesWaiting(1)
    assert inbox.join("a", "b", "c", after=1).roster == "abcd"
    assert inbox.join("e", after=2).roster == "abcd"


def test_a_world_that_was_larger_is_made_whole_at_once() -> None:
    inbox = running("abc", Rules(1, 9)).at(50).lose("c").join("a", "b", after=0)
    assert inbox.roster == "ab"
    assert inbox.join("c2", after=1).is_forming


def test_no_node_joins_once_another_has_succeeded() -> None:
    inbox = running("a", Rules(1, 2))
    inbox.say(SuccessReport(0, "a", 0))
    assert inbox.state.phase == JobPhase.COMPLETED
    inbox = running("ab", Rules(1, 3))
    inbox.say(SuccessReport(0, "a", 0))
    assert inbox.join("c", after=0).roster == "ab"


def test_restarts_are_counted_and_end() -> None:
    inbox = running("ab", Rules(2, 2))
    inbox.say(FailureReport(0, "b", 0, BOOM))
    assert inbox.state.cause == WorkerFailed(BOOM)
    inbox.join("a", "b", after=0)
    assert (inbox.roster, inbox.state.restarts) == ("ab", 1)
    inbox.say(FailureReport(0, "a", 0, BOOM))  # of the round before
    assert inbox.roster == "ab"
    inbox.say(FailureReport(0, "a", 1, BOOM))
    assert (inbox.state.phase, inbox.state.failure) == (JobPhase.CLOSED, BOOM)
    assert "host-x" not in inbox.state.reason


def test_changes_have_a_budget_of_their_own() -> None:
    inbox = running("abc", Rules(1, 3), Budget(0, 1)).lose("c").join("a", "b", after=0)
    assert inbox.join("d", after=1).roster == "ab", "late nodes wait when no change is left"
    inbox.lose("b")
    assert inbox.state.phase == JobPhase.CLOSED
    assert "host-b" in inbox.state.reason


def test_a_failure_that_blames_a_peer_waits_for_a_better_one() -> None:
    blaming = replace(BOOM, message="lost rank 1", blames_peer=True)
    inbox = running("abc", Rules(1, 3))
    inbox.say(FailureReport(0, "a", 0, blaming))
    assert inbox.roster == "abc"
    inbox.say(FailureReport(0, "b", 0, BOOM))
    assert inbox.state.cause == WorkerFailed(BOOM)

    inbox = running("abc", Rules(1, 3))
    inbox.say(FailureReport(0, "a", 0, blaming))
    inbox.lose("c")
    assert isinstance(inbox.state.cause, NodesLost)
    assert inbox.state.restarts == 0

    inbox = running("abc", Rules(1, 3))
    inbox.leader.note_heartbeats(0, {name: Heartbeat(1, -1) for name in "abc"}, "abc")
    inbox.say(FailureReport(0, "a", 0, blaming))
    inbox.leader.note_heartbeats(0, {name: Heartbeat(2, -1) for name in "abc"}, "abc")
    assert inbox.state.cause == WorkerFailed(blaming), "all live, so it was the cause"


def test_a_node_that_succeeded_and_died_is_no_loss() -> None:
    inbox = running("ab", Rules(1, 2))
    inbox.leader.note_heartbeats(0, {"a": Heartbeat(9, 0)}, "a")  # its last words
    assert inbox.lose("a").roster == "ab"
    assert inbox.state.alive == 1
    inbox.say(SuccessReport(0, "b", 0))
    assert inbox.state.phase == JobPhase.COMPLETED
    assert inbox.lose("b").state.alive == 1, "b has seen the end"


def test_a_silent_node_is_lost() -> None:
    rules = Rules(1, 2, heartbeat_ns=2 * S)
    inbox = running("ab", rules)
    for second in range(1, 6):
        assert inbox.leader.tick(second * S)
        inbox.leader.note_heartbeats(second * S, {"a": Heartbeat(second, -1)}, "ab")
        if second == 1:
            inbox.leader.note_heartbeats(second * S, {"b": Heartbeat(1, -1)}, "b")
    assert inbox.is_forming
    assert isinstance(inbox.state.cause, NodesLost)
    assert inbox.state.cause.reason == "host-b was silent for 6 s"


def test_a_leader_that_reads_late_grants_the_full_time_again() -> None:
    rules = Rules(1, 2, heartbeat_ns=2 * S)
    inbox = running("ab", rules)
    assert inbox.leader.tick(100 * S)
    inbox.leader.note_heartbeats(100 * S, {}, "ab")
    assert inbox.roster == "ab"


def test_a_message_that_arrives_twice_counts_once() -> None:
    inbox = LeaderWithInbox(Rules(2, 4)).join("a")
    request = JoinRequest(inbox.seq, Node("a", "host-a", "", 1, "", 1), -1)
    inbox.lose("a")
    inbox.leader.handle_message(inbox.now_ns, request)
    assert "a" not in inbox.leader.nodes


def test_a_node_that_leaves_gives_its_reason() -> None:
    inbox = running("abc", Rules(1, 3))
    inbox.say(LeaveNotice(0, "c", "host-c", "preempted"))
    assert isinstance(inbox.state.cause, NodesLost)
    assert inbox.state.cause.reason == "host-c left: preempted"


def test_the_cause_has_all_lost_nodes_though_it_names_some() -> None:
    names = [f"{i:02}" for i in range(40)]
    inbox = LeaderWithInbox(Rules(1, 40)).join(*names)
    roster = inbox.leader.roster
    inbox.lose(*names[:35], names[38])
    cause = inbox.state.cause
    assert isinstance(cause, NodesLost)
    assert len(cause.nodes) < 35
    assert cause.ids(roster) == {*names[:35], names[38]}
    heir = Leader(Rules(1, 40), inbox.state, roster, 0)
    assert set(heir.nodes) == {*names[35:38], names[39]}


def test_given_places() -> None:
    inbox = LeaderWithInbox(Rules(2, 2, places_are_given=True)).join("a", wish=1).join("b", wish=1)
    assert inbox.is_forming
    assert inbox.join("c", wish=0).roster == "ca"
    inbox.join("d", wish=2, after=0)
    assert inbox.state.refused[0].id == "d"
    assert "--node-rank 2 is not within 0 to 1" in inbox.state.refused[0].reason


def fail_for_peer(awaits_exit: bool) -> LeaderWithInbox:
    """Node b has failed because it lost a peer; then node a shows that it lives."""
    inbox = LeaderWithInbox(Rules(2, 2, longest_end_ns=30 * S), Budget(0)).join("a", "b")
    inbox.leader.note_heartbeats(0, {name: Heartbeat(1, -1) for name in "ab"}, "ab")
    inbox.say(FailureReport(0, "b", 0, replace(BOOM, blames_peer=True)))
    inbox.leader.note_heartbeats(0, {"a": Heartbeat(2, -1, awaits_exit)}, "a")
    return inbox


def test_a_failure_for_a_lost_peer_counts_once_the_others_live() -> None:
    assert fail_for_peer(awaits_exit=False).state.failure == replace(BOOM, blames_peer=True)


def test_a_failure_for_a_lost_peer_waits_for_the_exit_code_of_a_worker_that_has_left() -> None:
    inbox = fail_for_peer(awaits_exit=True)
    assert inbox.state.is_open
    cause = replace(BOOM, exit_code=3)
    inbox.say(FailureReport(0, "a", 0, cause))
    assert inbox.state.failure == cause


def test_a_worker_that_has_left_and_succeeds_is_not_the_cause() -> None:
    inbox = fail_for_peer(awaits_exit=True)
    inbox.leader.note_heartbeats(S, {"a": Heartbeat(3, -1)}, "a")
    assert inbox.state.failure == replace(BOOM, blames_peer=True)


def test_the_exit_code_of_a_worker_that_has_left_is_awaited_for_the_longest_end() -> None:
    inbox = fail_for_peer(awaits_exit=True)
    for second in range(1, 31):
        assert inbox.state.is_open
        inbox.at(second)
        inbox.leader.note_heartbeats(
            inbox.now_ns, {n: Heartbeat(2 + second, -1, n == "a") for n in "ab"}, "ab"
        )
    assert inbox.state.failure == replace(BOOM, blames_peer=True)


def test_of_two_with_one_place_the_later_one_is_refused_if_both_live() -> None:
    inbox = (
        LeaderWithInbox(Rules(3, 3, places_are_given=True))
        .join("a", wish=0)
        .join("b", wish=1)
        .join("c", wish=1)
    )
    heartbeat = 0
    while not inbox.state.refused:
        heartbeat += 1
        assert heartbeat < 20
        inbox.at(heartbeat * 2.5)
        inbox.leader.note_heartbeats(inbox.now_ns, dict.fromkeys("abc", Heartbeat(heartbeat, -1)), "abc")
    assert inbox.now_ns > 15 * S  # the first may be a previous start of the second
    ((refused),) = inbox.state.refused
    assert refused.id == "c"
    assert refused.reason == "two nodes have --node-rank 1, on host-b and host-c"
    inbox.join("d", wish=2)
    assert inbox.roster == "abd"


def test_a_node_that_is_started_again_gets_the_place_of_its_predecessor() -> None:
    inbox = LeaderWithInbox(Rules(2, 2, places_are_given=True)).join("a", wish=0).join("b", wish=1)
    inbox.join("c", wish=1).lose("b")
    for heartbeat in range(1, 20):
        inbox.at(heartbeat * 2.5)
        inbox.leader.note_heartbeats(inbox.now_ns, dict.fromkeys("ac", Heartbeat(heartbeat, -1)), "ac")
    assert inbox.state.refused == ()


def test_nodes_must_have_slots_enough_together() -> None:
    rules = Rules(1, 9, last_call_ns=S, min_slots=3)
    inbox = LeaderWithInbox(rules)
    inbox.say(JoinRequest(0, Node("a", "host-a", "", 1, "", 1), -1))
    assert inbox.at(2).is_forming
    inbox.say(JoinRequest(0, Node("b", "host-b", "", 2, "", 1), -1))
    assert inbox.at(3).roster == "ab"
    inbox.lose("a")
    inbox.say(JoinRequest(0, Node("b", "host-b", "", 2, "", 1), 0))
    assert inbox.at(60).is_forming


def node(name: str, wish: int = -1, host: str = "", host_id: str = "") -> Node:
    return Node(name, host or name, "127.0.0.1", 1, "", 1, wish=wish, host_id=host_id)


def names(nodes: tuple[Node, ...]) -> str:
    return "".join(node.id for node in nodes)


def test_newcomers_are_ordered_by_the_names_of_their_hosts() -> None:
    nodes = [node("c", host="node10"), node("a", host="node2"), node("b", host="node2")]
    assert names(assign_group_ranks((), nodes)) == "abc"
    assert sorted(["n10", "n9", "m", "n9a"], key=host_order) == ["m", "n9", "n9a", "n10"]


def test_newcomers_on_one_host_are_neighbours_among_containers_of_one_name() -> None:
    hosts = {"a": "1", "b": "2", "c": "1", "d": "2", "e": "1"}
    nodes = [node(name, host="box", host_id=host_id) for name, host_id in hosts.items()]
    assert names(assign_group_ranks((), nodes)) == "acebd"


def test_survivors_keep_their_places_and_newcomers_fill_the_holes() -> None:
    last = [node(name) for name in "abcd"]
    assert names(assign_group_ranks(last, [node("x"), last[3], last[1], last[0]])) == "abxd"


def test_in_a_smaller_world_the_highest_fill_the_holes() -> None:
    last = [node(name) for name in "abcdef"]
    assert names(assign_group_ranks(last, [last[5], last[1], last[4], last[0]])) == "abef"
    assert names(assign_group_ranks(last, [last[5], last[2]])) == "cf"


def test_a_wish_goes_before_a_habit_and_the_first_wish_before_the_second() -> None:
    last = [node("a"), node("b")]
    assert names(assign_group_ranks(last, [*last, node("x", wish=0), node("y", wish=0)])) == "xbay"
    assert names(assign_group_ranks([node("x", wish=0)], [node("y", wish=0), node("x", wish=0)])) == "xy"


def test_where_nodes_can_be_replaced_survivors_come_first_and_wishes_order_the_newcomers() -> None:
    last = [node(name) for name in "abc"]
    newcomers = [node("z"), node("x", wish=7), node("y", wish=0)]
    assert names(put_survivors_first(last, [*newcomers, last[2], last[1]])) == "bcyxz"


def test_a_wish_that_cannot_be_fulfilled_is_none() -> None:
    assert names(assign_group_ranks((), [node("a", wish=7), node("b")])) == "ab"


def test_agents_of_one_host_have_numbers_in_messages() -> None:
    nodes = [node("a", host="vm"), node("b", host="other"), node("c", host="vm")]
    assert node_names(nodes, nodes) == ["vm (node 0)", "other", "vm (node 2)"]
    assert node_names([node("late", host="vm")], nodes) == ["vm"]
