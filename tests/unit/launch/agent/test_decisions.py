"""What an agent decides, as stories: what happens, and what is done about it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.launch.agent import decisions as machine
from ronde.launch.agent.decisions import (
    TRANSITIONS,
    Agent,
    AgentEnd,
    AgentNotice,
    AgentTimer,
    Effect,
    EndContinuing,
    EndJob,
    Event,
    Failing,
    InterruptAgent,
    JoinRound,
    LeaveJob,
    NotifyWorkers,
    ReportFailure,
    ReportSuccess,
    RequestChange,
    SetAgentTimer,
    StartWorkers,
    StopWorkers,
    UpdateNode,
    WorkersContinue,
    WorkersEnded,
    WorkersSettled,
    WorkerState,
    WorldLeft,
)
from ronde.rendezvous.membership import (
    HOW_TO_RESUME,
    AllSucceeded,
    Budget,
    ChangeRequested,
    Ejected,
    Failure,
    JobClosed,
    Node,
    NodesLost,
    NodesWaiting,
    Notice,
    RendezvousBroken,
    Round,
    RoundBegan,
    RoundEnded,
    WorkerFailed,
)

SIGINT, SIGQUIT, SIGTERM = 2, 3, 15
BARRIER_NS = 300
NODES = tuple(Node(f"n{i}", f"host{i}", "10.0.0.1", 2, "tcp:10.0.0.1:1", 1) for i in range(3))
OURS = Failure(1, 1, "host0", 11, -9, "rank 1 was killed by SIGKILL")
OTHERS = Failure(3, 1, "host1", 33, 7, "rank 3 failed with exit code 7")


def a_round(number: int = 0, nodes: int = 2, restarts: int = 0, group_rank: int = 1) -> Round:
    return Round(number, NODES[:nodes], group_rank, restarts)


class Story:
    """An agent that has joined; effects are told by their type, without what is said to the user."""

    def __init__(
        self, restarts: int = 2, gives_way: bool = False, supply: int | None = None, least: int = 1
    ) -> None:
        self.agent = Agent(Budget(restarts), BARRIER_NS, gives_way, supply, least)
        assert self.agent.begin() == [JoinRound()]

    def at(self, now_ns: int, event: Event) -> list[Effect]:
        return [effect for effect in self.agent.step(now_ns, event) if not isinstance(effect, AgentNotice)]

    def after(self, *events: Event) -> list[Effect]:
        """What the last of these events brings."""
        effects: list[Effect] = []
        for event in events:
            effects = self.at(0, event)
        return effects


def running(nodes: int = 2, restarts: int = 2, used: int = 0, group_rank: int = 1) -> Story:
    story = Story(restarts)
    round = a_round(nodes=nodes, restarts=used, group_rank=group_rank)
    assert story.at(0, RoundBegan(round)) == [StartWorkers(round, again=used < restarts)]
    assert story.agent.state is WorkerState.HEALTHY
    return story


def test_a_job_that_succeeds() -> None:
    story = running()
    assert story.at(5, WorkersEnded(0, "")) == [ReportSuccess(), SetAgentTimer(5 + BARRIER_NS)]
    assert story.agent.state is WorkerState.SUCCEEDED
    assert story.at(9, AllSucceeded(0)) == [AgentEnd(0, "all nodes have succeeded")]


def test_the_exit_barrier_ends() -> None:
    story = running()
    story.at(5, WorkersEnded(0, ""))
    assert story.at(6, AgentTimer()) == [SetAgentTimer(5 + BARRIER_NS)]
    leave, exit = story.at(5 + BARRIER_NS, AgentTimer())
    assert isinstance(leave, LeaveJob)
    assert isinstance(exit, AgentEnd)
    assert exit.exit_code == 0


@pytest.mark.parametrize(("group_rank", "serves"), [(0, False), (1, True)])
def test_whose_store_others_need_waits_for_them_as_long_as_they_live(group_rank: int, serves: bool) -> None:
    story = running(group_rank=group_rank)
    story.at(5, WorkersEnded(0, ""))
    assert story.at(5 + BARRIER_NS, AgentTimer(serves)) == []
    assert story.at(5 + 10 * BARRIER_NS, AgentTimer(serves)) == []
    assert story.after(AllSucceeded(0)) == [AgentEnd(0, "all nodes have succeeded")]


def test_who_is_not_needed_says_so() -> None:
    said, exit = Agent(Budget(), BARRIER_NS).step(0, JobClosed("the job has completed", completed=True))
    assert said == AgentNotice("the job has completed; this node was not needed")
    assert isinstance(exit, AgentEnd)
    assert exit.exit_code == 0


def test_a_node_for_which_the_job_was_full_names_the_id() -> None:
    closed = JobClosed("the job has completed", completed=True, was_full=True)
    said, exit = Agent(Budget(), BARRIER_NS).step(0, closed)
    assert isinstance(said, AgentNotice)
    assert "since the job was full: start a job of its own with another id (--rdzv-id)" in said.text
    assert isinstance(exit, AgentEnd)
    assert exit.is_surplus


def test_who_succeeded_starts_again_if_the_round_ends() -> None:
    story = running()
    story.after(WorkersEnded(0, ""))
    assert story.after(RoundEnded(0, WorkerFailed(OTHERS))) == [JoinRound()]
    assert story.after(RoundBegan(a_round(1, restarts=1))) == [
        StartWorkers(a_round(1, restarts=1), again=True)
    ]
    assert story.after(AllSucceeded(0)) == []  # of a round long gone


def test_a_failure_is_told_at_once_and_the_workers_start_again_when_all_are_gone() -> None:
    story = running()
    assert story.after(Failing(OURS)) == [ReportFailure(OURS)]
    assert story.agent.state is WorkerState.UNHEALTHY
    ended = story.after(RoundEnded(0, WorkerFailed(OURS)))
    assert [type(effect) for effect in ended] == [StopWorkers]
    assert story.after(WorkersEnded(137, "", OURS)) == [JoinRound()]


def test_the_answer_to_a_failure_may_come_after_the_workers_are_gone() -> None:
    story = running()
    story.after(Failing(OURS))
    assert story.after(WorkersEnded(137, "", OURS)) == []
    assert story.agent.state is WorkerState.FAILED
    assert story.after(RoundEnded(0, WorkerFailed(OURS))) == [JoinRound()]


def test_the_last_failure_leaves_the_others_their_grace() -> None:
    story = running(restarts=0)
    story.after(Failing(OURS))
    assert story.after(JobClosed("no restart is left", OURS)) == []
    assert story.after(WorkersEnded(137, "", OURS)) == [AgentEnd(137, "no restart is left", OURS)]


def test_the_exit_code_is_that_with_which_the_worker_ends_after_its_exception() -> None:
    """It was told when the exception was raised, with the exit code that Python's processes have then."""
    story = running(restarts=0)
    raised, ended = replace(OURS, exit_code=1), replace(OURS, exit_code=5)
    story.after(Failing(raised))
    assert story.after(JobClosed("no restart is left", raised)) == []
    assert story.after(WorkersEnded(5, "", ended)) == [AgentEnd(5, "no restart is left", ended)]


def test_where_nodes_can_be_replaced_a_failure_takes_its_node_away() -> None:
    last = AgentEnd(137, OURS.message, OURS, gave_way=True)
    story = Story(1, gives_way=True)
    story.at(0, RoundBegan(a_round(restarts=1)))
    assert story.at(1, Failing(OURS)) == [ReportFailure(OURS)]
    assert story.at(1, Ejected("it left")) == [LeaveJob(OURS.message)]
    assert story.at(2, WorkersEnded(137, OURS.message, OURS)) == [last]
    sudden = Story(0, gives_way=True)
    sudden.at(0, RoundBegan(a_round()))
    assert sudden.at(1, WorkersEnded(137, OURS.message, OURS)) == [ReportFailure(OURS)]
    assert sudden.at(1, Ejected("it left")) == [last]


def test_a_node_takes_back_that_its_workers_have_succeeded() -> None:
    """A rank of another node waits for one of them."""
    story = running()
    assert ReportSuccess() in story.after(WorkersEnded(0, ""))
    assert story.after(WorkersEnded(1, OURS.message, OURS)) == [ReportFailure(OURS)]
    assert story.after(JobClosed("no restart is left", OURS)) == [AgentEnd(137, "no restart is left", OURS)]


def test_whose_failure_was_not_the_first_stays() -> None:
    story = Story(0, gives_way=True)
    assert story.after(RoundBegan(a_round()), WorkersEnded(1, OURS.message, OURS)) == [ReportFailure(OURS)]
    assert story.after(RoundEnded(0, NodesLost(NODES[1:2], "it left"))) == [JoinRound()]


def test_a_failure_elsewhere_ends_our_workers_at_once() -> None:
    story = running()
    assert story.after(JobClosed("no restart is left", OTHERS)) == [StopWorkers("no restart is left")]
    assert story.after(WorkersEnded(143, "")) == [AgentEnd(7, "no restart is left", OTHERS)]


def test_a_closed_job_turns_newcomers_away() -> None:
    assert Story().after(JobClosed("it is over")) == [AgentEnd(1, "it is over", is_closed=True)]
    assert Story().after(JobClosed("it is done", completed=True)) == [AgentEnd(0, "it is done")]


def test_who_lost_a_peer_is_told_of_when_no_better_cause_has_come() -> None:
    lost = replace(OURS, blames_peer=True)
    story = running()
    assert story.after(WorkersEnded(1, "", lost)) == [ReportFailure(lost)]
    assert story.after(RoundEnded(0, NodesLost(NODES[1:2], "host1 is gone"))) == [JoinRound()]


def test_lost_and_waiting_nodes_start_a_new_round() -> None:
    for cause in (NodesLost(NODES[1:2], "host1 is gone"), NodesWaiting(1)):
        story = running()
        assert [type(effect) for effect in story.after(RoundEnded(0, cause))] == [StopWorkers]
        assert story.agent.state is WorkerState.STOPPED
        # Workers that end well when they are asked to stop have not succeeded.
        assert story.after(WorkersEnded(0, "")) == [JoinRound()]


def test_an_ended_round_does_not_touch_a_later_one() -> None:
    story = running()
    story.after(RoundEnded(0, NodesWaiting(1)), WorkersEnded(0, ""), RoundBegan(a_round(1)))
    assert story.after(RoundEnded(0, NodesWaiting(1))) == []
    assert story.agent.state is WorkerState.HEALTHY


def test_a_loss_that_nobody_makes_good_ends_the_job() -> None:
    """As under Slurm, which starts no task again: two of three nodes are enough, one is not."""
    story = Story(supply=3, least=2)
    story.after(RoundBegan(a_round(nodes=3)))
    assert story.after(RoundEnded(0, NodesLost(NODES[2:], "host2 is gone")), WorkersEnded(1, "")) == [
        JoinRound()
    ]
    story.after(RoundBegan(a_round(1)))
    timer, stop = story.at(0, RoundEnded(1, NodesLost(NODES[:1], "host0 is gone")))[::-1]
    assert isinstance(timer, SetAgentTimer)
    assert stop == StopWorkers("the round is over")
    assert story.after(WorkersEnded(143, "ended")) == [JoinRound()]
    end, *rest = story.at(timer.at_ns, AgentTimer())
    assert isinstance(end, EndJob)
    assert end.reason == (
        "host0 is gone, and nobody starts it again: 1 of 3 nodes is left, and the job needs 2 "
        "(--nnodes MIN:MAX, or --min-np with -H, lets it go on with fewer). " + HOW_TO_RESUME
    )
    assert rest == [AgentEnd(1, end.reason)]


def test_a_signal_during_a_shortage_is_the_reason_of_the_end() -> None:
    story = Story(supply=3, least=2)
    story.after(RoundBegan(a_round(nodes=3)), RoundEnded(0, NodesLost(NODES[2:], "host2 is gone")))
    story.after(WorkersEnded(1, ""), RoundBegan(a_round(1)))
    timer = story.at(0, RoundEnded(1, NodesLost(NODES[:1], "host0 is gone")))[-1]
    assert isinstance(timer, SetAgentTimer)
    story.after(InterruptAgent(2, "interrupted"))
    assert story.at(timer.at_ns, AgentTimer()) == []
    assert story.at(timer.at_ns, WorkersEnded(143, "ended")) == [AgentEnd(130, "interrupted")]


def test_a_shortage_outlasts_an_ejection() -> None:
    story = Story(supply=2, least=2)
    story.after(RoundBegan(a_round(nodes=2)))
    timer = story.at(0, RoundEnded(0, NodesLost(NODES[1:2], "host1 is gone")))[-1]
    assert isinstance(timer, SetAgentTimer)
    assert story.after(Ejected("silent for 15 s")) == [
        StopWorkers("the others may have gone on", at_once=True)
    ]
    story.after(WorkersEnded(143, ""))
    assert isinstance(story.at(timer.at_ns, AgentTimer())[-1], AgentEnd)


@pytest.mark.parametrize(("ranges", "left"), [((1, 1, 3, 39), 2), ((1, 1, 3, 3, 5, 39), 3)])
def test_a_loss_of_many_nodes_counts_all_of_them(ranges: tuple[int, ...], left: int) -> None:
    """Though only the first ones are named."""
    many = tuple(replace(NODES[0], id=f"n{number}") for number in range(40))
    story = Story(supply=40, least=3)
    story.after(RoundBegan(Round(0, many, 0)))
    effects = story.at(0, RoundEnded(0, NodesLost(many[1:2], "many hosts are gone", ranges)))
    assert any(isinstance(effect, SetAgentTimer) for effect in effects) == (left < 3)


def test_who_has_come_back_is_lost_no_more() -> None:
    story = Story(supply=3, least=2)
    for number in (0, 2):
        story.after(RoundBegan(a_round(number, nodes=3)))
        lost = NodesLost(NODES[2:], "host2 is silent")
        assert story.after(RoundEnded(number, lost), WorkersEnded(1, "")) == [JoinRound()]
        story.after(
            RoundBegan(a_round(number + 1)), RoundEnded(number + 1, NodesWaiting(1)), WorkersEnded(1, "")
        )


def test_who_was_taken_for_dead_comes_back() -> None:
    story = running()
    assert story.after(Ejected("silent for 15 s")) == [
        StopWorkers("the others may have gone on", at_once=True)
    ]
    assert story.after(WorkersEnded(143, "")) == [JoinRound()]


def test_workers_that_may_save_are_killed_if_the_others_take_the_node_for_dead() -> None:
    story = running()
    assert story.after(InterruptAgent(SIGTERM, "SIGTERM")) == [LeaveJob("SIGTERM")]
    (stop,) = story.after(Ejected("silent for 15 s"))
    assert stop == StopWorkers("the others may have gone on", at_once=True)


def test_ctrl_c_ends_the_job_and_sigterm_this_node() -> None:
    story = running()
    assert story.after(InterruptAgent(SIGINT, "Ctrl-C")) == [EndJob("Ctrl-C")]
    assert story.after(JobClosed("Ctrl-C")) == []
    assert story.after(WorkersEnded(130, "Ctrl-C")) == [AgentEnd(130, "Ctrl-C")]
    assert running().after(InterruptAgent(SIGQUIT, "SIGQUIT")) == [EndJob("SIGQUIT")]
    story = running()
    assert story.after(InterruptAgent(SIGTERM, "SIGTERM")) == [LeaveJob("SIGTERM")]
    assert story.after(InterruptAgent(SIGTERM, "SIGTERM")) == []
    assert story.after(WorkersEnded(143, "SIGTERM")) == [AgentEnd(143, "SIGTERM")]


def test_an_interrupt_without_workers_ends_at_once() -> None:
    assert Story().after(InterruptAgent(SIGINT, "Ctrl-C")) == [EndJob("Ctrl-C"), AgentEnd(130, "Ctrl-C")]


def test_a_broken_rendezvous() -> None:
    assert Story().after(RendezvousBroken("nobody answers")) == [AgentEnd(2, "nobody answers")]
    story = running()
    assert story.after(RendezvousBroken("the store is lost")) == [StopWorkers("the store is lost")]
    assert story.after(WorkersEnded(143, "")) == [AgentEnd(1, "the store is lost")]


def test_success_outlives_the_store() -> None:
    story = running()
    story.after(WorkersEnded(0, ""))
    (exit,) = story.after(RendezvousBroken("the store is lost"))
    assert isinstance(exit, AgentEnd)
    assert exit.exit_code == 0


# Workers that continue.


def continuing(nodes: int = 1) -> Story:
    story = running(nodes, group_rank=0)
    assert story.after(WorkersContinue(2)) == []
    return story


def test_workers_that_continue_outlive_a_round() -> None:
    story = continuing()
    assert story.after(WorkersContinue(1), Failing(OURS)) == [
        NotifyWorkers(0, OURS.message),
        ReportFailure(OURS),
    ]
    assert story.after(RoundEnded(0, WorkerFailed(OURS))) == [
        NotifyWorkers(0, OURS.message),
        StopWorkers("the round is over", keeps=True),
    ]
    assert story.after(WorkersSettled()) == [JoinRound()]
    assert story.agent.state is WorkerState.HEALTHY
    following = a_round(1, 1, restarts=1, group_rank=0)
    assert story.after(RoundBegan(following)) == [
        StartWorkers(following, True, OURS.message, (OURS.message,))
    ]


def test_a_new_node_is_no_loss() -> None:
    story = continuing(2)
    tell, stop = story.after(RoundEnded(0, NodesWaiting(1)))
    assert tell == NotifyWorkers(0, "1 more node can take part", is_lost=False)
    assert stop == StopWorkers("the round is over", keeps=True)
    story.after(WorkersSettled())
    (start,) = story.after(RoundBegan(a_round(1, 3)))
    assert start == StartWorkers(a_round(1, 3), True, "1 more node can take part")


def test_all_workers_start_again_when_those_that_were_to_continue_have_ended_too() -> None:
    story = continuing()
    story.after(RoundEnded(0, WorkerFailed(OURS)))
    said, join = story.agent.step(0, WorkersEnded(137, "", OURS))
    assert said == AgentNotice(f"{OURS.message}; starting all workers again")
    assert join == JoinRound()


def test_after_the_death_of_all_that_continue_the_next_round_begins_with_new_workers() -> None:
    story = continuing()
    story.after(RoundEnded(0, WorkerFailed(OURS)), WorkersSettled())
    assert story.after(WorkersEnded(137, "rank 0 was killed", OURS)) == [UpdateNode()]
    assert story.after(Ejected("the store was silent")) == [JoinRound()]
    assert story.after(RoundBegan(a_round(1, 1, group_rank=0))) == [
        StartWorkers(a_round(1, 1, group_rank=0), True)
    ]


@pytest.mark.parametrize(("previous", "keeps"), [(0, True), (1, False)])
def test_workers_outside_of_all_worlds_outlive_the_lease_unless_others_have_gone_on(
    previous: int, keeps: bool
) -> None:
    story = continuing(2)
    assert story.after(Ejected("the store is silent", is_unsure=True)) == [
        NotifyWorkers(0, "the store is silent"),
        StopWorkers("the store is silent", at_once=True, keeps=True),
    ]
    assert story.after(WorkersSettled()) == [JoinRound(is_outside=True)]
    following = replace(a_round(2, 1, group_rank=0), previous=previous)
    silent = "the store is silent"
    assert story.after(RoundBegan(following)) == [StartWorkers(following, True, silent, (silent,), keeps)]


def test_workers_that_do_not_continue_end_with_the_lease() -> None:
    kill = StopWorkers("the others may have gone on", at_once=True)
    assert running().after(Ejected("the store is silent", is_unsure=True)) == [kill]


@pytest.mark.parametrize("last", [JobClosed("over"), RendezvousBroken("over")])
def test_no_worker_continues_after_the_end_of_the_job(last: Event) -> None:
    story = continuing()
    story.after(RoundEnded(0, WorkerFailed(OURS)), WorkersSettled())
    assert story.after(last) == [StopWorkers("over")]
    assert [type(effect) for effect in story.after(WorkersEnded(143, ""))] == [AgentEnd]


def test_without_another_round_those_that_continue_are_ended() -> None:
    story = continuing()
    story.after(Failing(OURS))
    assert story.after(JobClosed(OURS.message, OURS)) == [EndContinuing(OURS.message)]


def test_workers_that_have_left_their_world_get_another_round() -> None:
    story = continuing()
    assert story.after(WorldLeft(3, "of a round long gone")) == []
    assert story.after(WorldLeft(0, "a replacement is ready")) == [RequestChange("a replacement is ready")]


# The drawing in the header, the table at the end, and what the machine does.

ONE_OF_EACH: list[Event] = [
    *(
        RoundBegan(a_round()),
        Failing(OURS),
        AllSucceeded(0),
        Ejected("silent"),
        Ejected("silent", is_unsure=True),
        Notice("hello"),
        AgentTimer(),
    ),
    *(
        RoundEnded(0, cause)
        for cause in (
            WorkerFailed(OTHERS),
            NodesLost(NODES[1:], "gone"),
            NodesWaiting(2),
            ChangeRequested("a replacement is ready"),
        )
    ),
    *(WorkersContinue(1), WorkersSettled(), WorldLeft(0, "a replacement is ready")),
    *(JobClosed("over"), RendezvousBroken("lost"), InterruptAgent(SIGINT, "Ctrl-C")),
    *(WorkersEnded(0, ""), WorkersEnded(1, "", OURS)),
]


def explore(gives_way: bool) -> tuple[set[tuple[str, str, str]], set[tuple[type, type]]]:
    """Try every event in every state: the changes of state, and the pairs of state and event that had an effect."""
    changes, effective = set(), set()
    agents = [Agent(Budget(1), BARRIER_NS, gives_way, supply=3, least=2)]
    known = {agents[0]._state}
    for agent in agents:  # grows
        for event in ONE_OF_EACH:
            after = copy.deepcopy(agent)
            effects = after.step(2 * BARRIER_NS if isinstance(event, AgentTimer) else 0, event)
            before, changed = type(agent._state), type(after._state)
            if effects or agent._state != after._state:
                effective.add((before, type(event)))
            if before is not changed:
                changes.add((before.__name__, type(event).__name__, changed.__name__))
            if after._state not in known:
                known.add(after._state)
                agents.append(after)
    return changes, effective


def test_drawing_and_table_show_what_the_machine_does() -> None:
    arrows = re.findall(r"^    (\w.*?) +-- (.+?) --> +(\w+(?:, \w+)*)", machine.__doc__ or "", re.MULTILINE)
    drawn = {
        (before, event, after)
        for befores, events, afters in arrows
        for before in befores.split(", ")
        for event in events.split(", ")
        for after in afters.split(", ")
    }
    explored = [explore(gives_way) for gives_way in (False, True)]
    assert explored[0][0] | explored[1][0] == drawn
    assert explored[0][1] | explored[1][1] == set(TRANSITIONS)


# Whatever happens, in whatever order.

EVENTS = st.one_of(
    st.builds(RoundBegan, st.builds(a_round, st.integers(0, 3), st.integers(1, 3), st.integers(0, 2))),
    st.builds(
        RoundEnded,
        st.integers(0, 3),
        st.sampled_from([WorkerFailed(OTHERS), NodesLost(NODES[1:], "gone"), NodesWaiting(2)]),
    ),
    st.sampled_from([AllSucceeded(0), AllSucceeded(1), Notice("hello"), AgentTimer()]),
    st.builds(Ejected, st.just("silent"), st.booleans()),
    st.sampled_from([JobClosed("over"), JobClosed("over", OTHERS), RendezvousBroken("lost")]),
    st.sampled_from([Failing(OURS), InterruptAgent(SIGINT, "Ctrl-C"), InterruptAgent(SIGTERM, "SIGTERM")]),
    st.sampled_from([WorkersContinue(0), WorkersContinue(1), WorkersSettled(), WorldLeft(0, "left")]),
    st.builds(WorkersEnded, st.sampled_from([0, 1]), st.just(""), st.sampled_from([None, OURS])),
)


@given(st.lists(st.tuples(st.integers(0, 500), EVENTS), max_size=30))
def test_in_any_order(happened: list[tuple[int, Event]]) -> None:
    story = Story()
    alive, joined, over, keeps = False, True, False, False
    said: Effect | None = None
    for now_ns, event in sorted(happened, key=lambda each: each[0]):
        alive = alive and not isinstance(event, WorkersEnded)
        for effect in story.agent.step(now_ns, event):
            assert not over, "nothing happens after the exit"
            match effect:
                case JoinRound():
                    assert not alive or keeps
                    joined = True
                case StartWorkers():
                    assert joined
                    assert not alive or keeps
                    alive, joined, said, keeps = True, False, None, False
                case StopWorkers():
                    assert alive
                    keeps = effect.keeps
                case ReportSuccess():
                    assert not said
                    said = effect
                case ReportFailure():
                    assert not isinstance(said, ReportFailure)
                    said = effect
                case AgentEnd():
                    assert not alive
                    over = True
    # Whatever came before, a signal and the end of the workers end it.
    effects = story.agent.step(600, InterruptAgent(SIGTERM, "SIGTERM")) + story.agent.step(
        601, WorkersEnded(143, "SIGTERM")
    )
    assert over or sum(isinstance(effect, AgentEnd) for effect in effects) == 1
