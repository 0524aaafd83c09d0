"""What the agent decides about its workers, as stories: what happens at which second, and what is done about it."""

from __future__ import annotations

import random

import pytest

from ronde.launch.agent.worker import name_ranks
from ronde.launch.agent.worker_group import (
    PATIENCE_NS,
    Absent,
    Effect,
    Event,
    Exited,
    GroupEnd,
    GroupPhase,
    GroupSettled,
    GroupTimer,
    InterruptGroup,
    NoRoundFollows,
    NotStarted,
    Policy,
    SetGroupTimer,
    SignalWorkers,
    Started,
    StopGroup,
    Vacated,
    WorkerAwaits,
    WorkerCompleted,
    WorkerContinues,
    WorkerGroup,
    WorkerJoined,
    WorkerJoins,
    WorkerLeft,
    WorkerMissed,
    WorkerRaised,
    WorkerReplaced,
)

SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGSEGV, SIGPIPE, SIGTERM = 1, 2, 3, 9, 11, 13, 15


PATIENT = Policy(farewell_ns=30 * 10**9)


def tell(effect: Effect) -> str:
    """An effect as a phrase; seconds instead of nanoseconds."""
    match effect:
        case SignalWorkers(ranks, signum, _):
            return f"signal {signum} to {name_ranks(ranks)}"
        case SetGroupTimer(at_ns):
            return f"timer at {at_ns / 1e9:g}"
        case GroupSettled():
            return "settled"
        case GroupEnd(exit_code, _, failed_rank):
            return f"finish {exit_code}" + (f" because of {failed_rank}" if failed_rank is not None else "")


class Story:
    """A group of workers, started at second 0 with process 100 + rank."""

    def __init__(self, ranks: int, policy: Policy | None = None) -> None:
        self.group = WorkerGroup(range(ranks), policy or Policy(farewell_ns=PATIENCE_NS))
        self.reason = ""
        for rank in range(ranks):
            assert self.at(0, Started(rank, 100 + rank)) == []

    def at(self, second: float, event: Event) -> list[str]:
        effects = self.group.step(round(second * 1e9), event)
        for effect in effects:
            if not isinstance(effect, SetGroupTimer | GroupSettled):
                self.reason = effect.reason
        return [tell(effect) for effect in effects]


def test_all_succeed() -> None:
    story = Story(3)
    assert story.at(1, Exited(1, 0)) == []
    assert story.at(2, Exited(0, 0)) == []
    assert story.at(9, Exited(2, 0)) == ["finish 0"]
    assert story.reason == "ranks 0, 1, 2 succeeded"


def test_one_worker_fails_alone() -> None:
    story = Story(1)
    assert story.at(2.1, Exited(0, 3)) == ["finish 3 because of 0"]
    assert story.reason == "rank 0 (pid 100) failed with exit code 3 after 2.1 s"


def test_survivors_notice_by_themselves() -> None:
    story = Story(3)
    assert story.at(1, Exited(1, 3)) == ["timer at 4"]
    assert story.at(1.2, Exited(0, 1, blames_peer=True)) == []
    assert story.at(1.3, Exited(2, 1, blames_peer=True)) == ["finish 3 because of 1"]


def test_survivors_that_do_not_notice_are_asked_and_then_killed() -> None:
    story = Story(4)
    assert story.at(1, Exited(1, 3)) == ["timer at 4"]
    assert story.at(2, Exited(0, 0)) == []
    assert story.at(4, GroupTimer()) == ["signal 15 to ranks 2, 3", "timer at 9"]
    assert story.reason == "still running 3 s after rank 1 failed"
    assert story.at(5, Exited(2, -SIGTERM)) == []
    assert story.at(9, GroupTimer()) == ["signal 9 to rank 3", "timer at 14"]
    assert story.at(9.1, Exited(3, -SIGKILL)) == ["finish 3 because of 1"]


def test_what_cannot_be_killed_is_left() -> None:
    story = Story(2)
    story.at(1, Exited(0, 1))
    story.at(4, GroupTimer())
    story.at(9, GroupTimer())
    assert story.at(14, GroupTimer()) == ["finish 1 because of 0"]
    assert story.reason.endswith("; rank 1 could not be killed")
    assert story.at(15, Exited(1, 0)) == []


def test_who_blames_a_peer_is_not_the_cause() -> None:
    """Rank 1 closes its connections long before its process ends, so that rank 0 may be the first to exit."""
    story = Story(2)
    assert story.at(1, Exited(0, 1, blames_peer=True)) == ["timer at 4"]
    assert story.at(1.5, Exited(1, 7)) == ["finish 7 because of 1"]


@pytest.mark.parametrize(("returncode", "end"), [(3, "finish 3 because of 1"), (0, "finish 1 because of 0")])
def test_a_worker_that_has_left_has_time_for_its_exit_handlers(returncode: int, end: str) -> None:
    story = Story(2, PATIENT)
    assert story.at(1, WorkerLeft(1)) == []
    assert story.at(1.1, Exited(0, 1, blames_peer=True)) == ["timer at 31.1"]
    assert story.at(20, Exited(1, returncode)) == [end]


def test_a_worker_that_has_left_and_succeeds_gives_others_no_time() -> None:
    story = Story(3, PATIENT)
    story.at(1, WorkerLeft(1))
    story.at(1.1, Exited(0, 1, blames_peer=True))
    assert story.at(10, Exited(1, 0)) == ["timer at 13"]
    assert story.at(13, GroupTimer()) == ["signal 15 to rank 2", "timer at 18"]


def test_a_worker_that_has_left_and_blames_a_peer_has_no_more_time() -> None:
    story = Story(2, PATIENT)
    for rank in 1, 0:
        story.at(1, WorkerRaised(rank, "PeerLostError", blames_peer=True))
        story.at(1, WorkerLeft(rank))
    assert story.at(1.1, Exited(1, 1, blames_peer=True)) == ["timer at 4.1"]


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_worker_has_failed_that_ends_and_never_joins_the_others(ends_first: bool) -> None:
    story = Story(3)
    events: list[Event] = [Exited(1, 0), WorkerJoins(0, 0)]
    assert story.at(1, events[not ends_first]) == []
    assert story.at(1, events[ends_first]) == ["timer at 4"]
    assert story.at(2, WorkerJoins(2, 0)) == []
    assert story.at(4, GroupTimer()) == ["signal 15 to ranks 0, 2", "timer at 9"]
    assert story.reason == "still running 3 s after rank 1 ended"
    story.at(5, Exited(0, -SIGTERM))
    assert story.at(5, Exited(2, -SIGTERM)) == ["finish 1 because of 1"]
    assert story.reason == (
        "rank 1 (pid 101), for which rank 0 waits, ended with exit code 0 after 1.0 s without calling ronde.init()"
    )


def test_a_worker_may_end_as_soon_as_it_has_joined_the_others() -> None:
    story = Story(2)
    for rank in 0, 1:
        story.at(1, WorkerJoins(rank, 0))
        story.at(1, WorkerJoined(rank))
    story.at(2, WorkerLeft(1))
    assert story.at(2, Exited(1, 0)) == []
    assert story.at(3, WorkerJoins(0, 1)) == ["timer at 6"], "a second time it waits in vain"
    story.at(4, Exited(0, 1))
    assert "for which rank 0 waits, ended with exit code 0" in story.reason
    assert "without calling ronde.init() again" in story.reason


def test_a_worker_that_joins_late_counts_the_epochs_of_the_others() -> None:
    """A fresh process, whose first epoch is the third one of the survivors."""
    story = Story(2)
    for rank in 0, 1:
        story.at(1, WorkerJoins(rank, 2))
    assert story.at(2, Exited(1, 0)) == []
    assert story.group.absent == Absent(1, 3)


def test_a_worker_that_does_not_wait_any_more_misses_nobody() -> None:
    """Rank 1 joins as another program (`os.execv`), which cannot announce it."""
    story = Story(2)
    story.at(1, WorkerJoins(0, 1))
    story.at(2, WorkerJoined(0))
    assert story.at(3, Exited(1, 0)) == []


def test_a_worker_that_replaces_its_program_is_the_cause_of_those_that_lose_it() -> None:
    story = Story(3)
    assert story.at(1, WorkerRaised(2, "PeerLostError", blames_peer=True)) == ["timer at 6"]
    assert story.at(1, WorkerReplaced(1, "python other.py")) == ["timer at 4"]
    story.at(1.5, Exited(2, 1, blames_peer=True))
    assert story.at(4, GroupTimer()) == ["signal 15 to ranks 0, 1", "timer at 9"]
    assert story.reason == "still running 3 s after rank 1 replaced its program"
    story.at(5, Exited(1, -SIGTERM))
    assert story.at(5, Exited(0, -SIGTERM)) == ["finish 1 because of 1"]
    assert story.reason == (
        "rank 1 (pid 101) left the other ranks without ronde.shutdown() after 1.0 s: it replaced its program by "
        "`python other.py` (os.exec*), or closed its connections"
    )


def test_a_worker_has_failed_for_which_a_rank_of_another_node_waits() -> None:
    story = Story(2)
    assert story.group.absent is None
    story.at(1, WorkerJoins(1, 0))
    assert story.at(1, Exited(1, 0)) == []
    assert story.group.absent == Absent(1, 1)
    assert story.at(2, Exited(0, 0)) == ["finish 0"]
    assert story.group.absent == Absent(0, 0), "others would wait for it first"
    assert story.at(3, WorkerMissed(0, 7)) == ["finish 1 because of 0"]
    assert story.reason == (
        "rank 0 (pid 100), for which rank 7 waits, ended with exit code 0 after 2.0 s without calling ronde.init()"
    )
    assert story.group.absent is None
    assert story.at(4, WorkerMissed(0, 7)) == []


def test_the_other_workers_of_a_missed_one_have_a_grace_period() -> None:
    story = Story(2)
    story.at(1, Exited(1, 0))
    assert story.at(2, WorkerMissed(1, 7)) == ["timer at 5"]
    assert story.at(5, GroupTimer()) == ["signal 15 to rank 0", "timer at 10"]
    assert story.at(6, Exited(0, -SIGTERM)) == ["finish 1 because of 1"]


def test_only_a_worker_that_has_succeeded_is_missed() -> None:
    story = Story(3)
    assert story.at(1, WorkerMissed(0, 7)) == []
    story.at(1, Exited(1, 0, leftovers=True))
    assert story.group.absent is None
    assert story.at(2, WorkerMissed(1, 7)) == []
    story.at(3, Exited(0, 5))
    assert story.at(3, Vacated(1)) == []
    assert story.group.absent is None, "the job has failed otherwise"
    assert story.at(3, WorkerMissed(1, 7)) == []


def test_a_process_that_a_worker_leaves_behind_may_join_in_its_place() -> None:
    story = Story(2)
    story.at(1, WorkerJoins(0, 0))
    assert story.at(2, Exited(1, 0, leftovers=True)) == []
    assert story.at(3, WorkerJoins(1, 0)) == []
    assert story.at(4, Vacated(1)) == []


def test_who_blames_a_peer_stands_in_for_a_cause_that_never_comes() -> None:
    story = Story(3)
    story.at(1, Exited(0, 5, blames_peer=True))
    story.at(1.1, Exited(2, 6, blames_peer=True))
    assert story.at(1.2, Exited(1, 0)) == ["finish 5 because of 0"]


def test_the_exception_that_was_raised_first_is_the_cause() -> None:
    """Rank 1 has raised first and takes long to end."""
    story = Story(3)
    story.at(1, Exited(0, 1, raised_ns=2000))
    assert story.group.cause == 0
    story.at(1.1, Exited(1, 7, raised_ns=1000))
    assert story.group.cause == 1
    assert story.at(1.2, Exited(2, 8)) == ["finish 7 because of 1"]


def test_who_has_raised_is_the_cause_before_it_has_ended() -> None:
    """Rank 1 joins threads after its exception, and rank 0, which it has left, ends sooner."""
    story = Story(2, PATIENT)
    assert story.at(1, WorkerRaised(1, "ValueError: boom", raised_ns=500)) == ["timer at 31"]
    assert story.group.cause == 1
    assert story.group.workers[1].describe() == "rank 1 (pid 101) raised ValueError: boom after 1.0 s"
    assert story.at(1.1, Exited(0, 1, blames_peer=True)) == []
    assert story.at(9, Exited(1, 5)) == ["finish 5 because of 1"]
    assert story.reason == "rank 1 (pid 101) failed with exit code 5 after 9.0 s"


def test_who_has_raised_replaces_who_blames_it_and_gets_its_time() -> None:
    story = Story(2, PATIENT)
    assert story.at(1, WorkerRaised(0, "PeerLostError", blames_peer=True)) == ["timer at 31"]
    assert story.at(1.1, Exited(0, 1, blames_peer=True)) == ["timer at 4.1"]
    assert story.group.cause is None
    assert story.at(1.2, WorkerRaised(1, "ValueError: boom")) == ["timer at 31"]
    assert story.group.cause == 1
    assert story.at(2, Exited(1, 1)) == ["finish 1 because of 1"]


def test_who_never_ends_after_its_exception_is_ended() -> None:
    """One of its threads lives on; the exit code is that of the exception, not that of our signal."""
    story = Story(2, PATIENT)
    story.at(1, WorkerRaised(1, "ValueError: boom"))
    assert story.at(31, GroupTimer()) == ["signal 15 to ranks 0, 1", "timer at 36"]
    assert story.reason == "still running 30 s after rank 1 raised ValueError: boom"
    story.at(31.1, Exited(0, -SIGTERM))
    assert story.at(31.2, Exited(1, -SIGTERM)) == ["finish 1 because of 1"]
    assert story.reason == "rank 1 (pid 101) raised ValueError: boom after 1.0 s"


def test_who_is_ending_gets_no_signal_for_the_sake_of_others() -> None:
    story = Story(2, PATIENT)
    story.at(1, WorkerRaised(1, "ValueError: boom"))
    assert story.at(1.1, StopGroup("the round is over")) == ["signal 15 to rank 0", "timer at 6.1"]
    assert story.at(1.2, Exited(0, -SIGTERM)) == []
    assert story.at(6.1, GroupTimer()) == ["signal 9 to rank 1", "timer at 11.1"]


def test_when_all_are_to_start_again_nobody_gets_a_grace() -> None:
    story = Story(3, Policy(starts_again=True, stop_signum=SIGINT))
    assert story.at(1, Exited(0, 1, blames_peer=True)) == ["timer at 4"]
    assert story.group.cause is None
    assert story.at(1.1, Exited(1, 7)) == ["signal 2 to rank 2", "timer at 6.1"]
    assert story.group.cause == 1
    assert story.at(1.2, Exited(2, 130)) == ["finish 7 because of 1"]


def test_workers_that_are_not_wanted_any_more() -> None:
    story = Story(2)
    assert story.at(1, StopGroup("a node is lost")) == ["signal 15 to ranks 0, 1", "timer at 6"]
    assert story.at(2, StopGroup("again")) == []
    assert story.at(2, Exited(0, 1)) == []
    assert story.at(6, GroupTimer()) == ["signal 9 to rank 1", "timer at 11"]
    assert story.at(6.1, Exited(1, -SIGKILL)) == ["finish 0"]


def test_workers_that_others_may_have_replaced_get_no_time() -> None:
    story = Story(2)
    assert story.at(1, StopGroup("a node is lost")) == ["signal 15 to ranks 0, 1", "timer at 6"]
    assert story.at(2, StopGroup("the others go on", at_once=True)) == [
        "signal 9 to ranks 0, 1",
        "timer at 7",
    ]
    assert story.at(3, StopGroup("the others go on", at_once=True)) == []


def test_who_was_told_to_end_is_not_the_cause() -> None:
    story = Story(2)
    story.at(1, Exited(0, 5, blames_peer=True))
    story.at(4, GroupTimer())
    assert story.at(4.1, Exited(1, -SIGTERM)) == ["finish 5 because of 0"]


@pytest.mark.parametrize(
    ("returncode", "exit_code", "reason"),
    [
        (1, 1, "failed with exit code 1 after 0.5 s"),
        (-SIGKILL, 137, "was killed by SIGKILL after 0.5 s (out of memory?)"),
        (-SIGSEGV, 139, "was killed by SIGSEGV after 0.5 s"),
        (-SIGTERM, 143, "was killed by SIGTERM after 0.5 s"),
        (-40, 168, "was killed by signal 40 after 0.5 s"),
    ],
)
def test_exit_code_and_reason(returncode: int, exit_code: int, reason: str) -> None:
    story = Story(1)
    assert story.at(0.5, Exited(0, returncode)) == [f"finish {exit_code} because of 0"]
    assert story.reason == f"rank 0 (pid 100) {reason}"


@pytest.mark.parametrize(
    ("signum", "forwarded", "exit_code", "reason"),
    [
        (SIGINT, SIGINT, 130, "interrupted by Ctrl-C"),
        (SIGTERM, SIGTERM, 143, "ended by SIGTERM"),
        (SIGHUP, SIGHUP, 129, "ended by SIGHUP"),
        (SIGPIPE, SIGTERM, 141, "the output cannot be written any more"),
    ],
)
def test_interrupt(signum: int, forwarded: int, exit_code: int, reason: str) -> None:
    story = Story(2)
    assert story.at(1, InterruptGroup(signum)) == [f"signal {forwarded} to ranks 0, 1", "timer at 6"]
    assert story.at(1.1, Exited(0, 1)) == []
    assert story.at(6, GroupTimer()) == ["signal 9 to rank 1", "timer at 11"]
    assert story.at(6.1, Exited(1, -SIGKILL)) == [f"finish {exit_code}"]
    assert story.reason == reason


def test_who_is_not_started_when_an_interrupt_comes_never_is() -> None:
    group = WorkerGroup(range(2))
    assert group.step(0, InterruptGroup(SIGTERM)) == [GroupEnd(143, "ended by SIGTERM")]


@pytest.mark.parametrize(("first", "second"), [(SIGINT, SIGINT), (SIGINT, SIGQUIT), (SIGQUIT, SIGQUIT)])
def test_second_ctrl_c_kills_at_once(first: int, second: int) -> None:
    story = Story(2)
    story.at(1, InterruptGroup(first))
    assert story.at(1.5, InterruptGroup(second)) == ["signal 9 to ranks 0, 1", "timer at 6.5"]
    assert story.at(1.6, InterruptGroup(SIGINT)) == []


def test_second_sigterm_gives_no_more_time() -> None:
    story = Story(1)
    story.at(1, InterruptGroup(SIGTERM))
    assert story.at(3, InterruptGroup(SIGTERM)) == ["signal 15 to rank 0"]
    assert story.at(6, GroupTimer()) == ["signal 9 to rank 0", "timer at 11"]


def test_an_impatient_user_need_not_wait_for_the_grace() -> None:
    story = Story(2)
    story.at(1, Exited(0, 3))
    assert story.at(1.5, InterruptGroup(SIGINT)) == ["signal 2 to rank 1", "timer at 6.5"]
    assert story.at(1.6, Exited(1, -SIGINT)) == ["finish 3 because of 0"]


def test_timers_come_early_late_and_for_nothing() -> None:
    story = Story(2)
    assert story.at(0.5, GroupTimer()) == []
    story.at(1, Exited(0, 1))
    assert story.at(3.999, GroupTimer()) == ["timer at 4"]
    assert story.at(60, GroupTimer()) == ["signal 15 to rank 1", "timer at 65"]


def test_no_room_for_another_process() -> None:
    story = Story(0)
    story.group = WorkerGroup(range(4))
    story.at(0, Started(0, 100))
    assert story.at(0, NotStarted(1, "Too many open files")) == ["signal 15 to rank 0", "timer at 5"]
    assert story.at(0.1, Exited(0, -SIGTERM)) == ["finish 126 because of 1"]
    assert story.reason == "rank 1 could not be started: Too many open files"


def test_nothing_could_be_started() -> None:
    group = WorkerGroup(range(4))
    assert [tell(effect) for effect in group.step(0, NotStarted(0, "no"))] == ["finish 126 because of 0"]


def test_processes_that_outlive_their_worker_are_ended_last() -> None:
    story = Story(2)
    assert story.at(1, Exited(0, 0, leftovers=True)) == []
    assert story.at(2, Exited(1, 0)) == ["timer at 3"]
    assert story.at(3, GroupTimer()) == ["signal 15 to rank 0", "timer at 8"]
    assert story.reason == "the workers have ended but left processes behind"
    assert story.at(3.1, Vacated(0)) == ["finish 0"]


def test_processes_that_end_after_their_worker_are_not_mentioned() -> None:
    """Python's multiprocessing has helpers that end when they see that nobody needs them."""
    story = Story(1)
    assert story.at(1, Exited(0, 0, leftovers=True)) == ["timer at 2"]
    assert story.at(1.05, Vacated(0)) == ["finish 0"]


def test_after_a_failure_what_is_left_behind_has_no_more_time() -> None:
    story = Story(2)
    assert story.at(1, Exited(0, 3, leftovers=True)) == ["timer at 4"]
    assert story.at(1.5, Exited(1, 1)) == ["timer at 2.5"]
    assert story.at(2.5, GroupTimer()) == ["signal 15 to rank 0", "timer at 7.5"]
    assert story.at(2.6, Vacated(0)) == ["finish 3 because of 0"]
    late = Story(2)
    late.at(1, Exited(0, 3, leftovers=True))
    assert late.at(3.5, Exited(1, 1)) == []
    assert late.at(4, GroupTimer())[0] == "signal 15 to rank 0"


def test_processes_that_go_in_time_are_not_mentioned() -> None:
    story = Story(2)
    story.at(1, Exited(0, 0, leftovers=True))
    assert story.at(1.5, Vacated(0)) == []
    assert story.at(2, Exited(1, 0)) == ["finish 0"]


def test_processes_that_outlive_an_interrupted_worker_have_the_same_time() -> None:
    """A shell dies of SIGTERM at once, while the training that it started saves its state."""
    story = Story(1)
    story.at(1, InterruptGroup(SIGTERM))
    assert story.at(1.1, Exited(0, -SIGTERM, leftovers=True)) == []
    assert story.at(4, Vacated(0)) == ["finish 143"]


@pytest.mark.parametrize(
    ("signum", "given_s"), [(SIGTERM, 30), (SIGHUP, 30), (10, 30), (SIGINT, 5), (SIGQUIT, 5), (SIGPIPE, 5)]
)
def test_who_is_told_from_outside_may_take_longer(signum: int, given_s: int) -> None:
    """A scheduler gives time to save what there is; at a terminal somebody waits."""
    story = Story(1, Policy(farewell_ns=30 * 10**9))
    asked = SIGTERM if signum == SIGPIPE else signum
    assert story.at(1, InterruptGroup(signum)) == [f"signal {asked} to rank 0", f"timer at {1 + given_s}"]
    assert story.at(1 + given_s, GroupTimer()) == ["signal 9 to rank 0", f"timer at {6 + given_s}"]
    assert story.reason == f"still running {given_s} s later"


def random_event(choose: random.Random, running: set[int], left: set[int]) -> Event:
    """Something that can happen while these ranks run and those have left processes behind; often nothing."""
    kind = choose.choice(
        ["raise", "join", "joined", "leave", "exit", "vacate", "interrupt", "nothing", "nothing"]
    )
    if kind == "raise" and running:
        return WorkerRaised(
            choose.choice(sorted(running)), "ValueError", choose.random() < 0.5, choose.randrange(9)
        )
    if kind == "join" and running:
        return WorkerJoins(choose.choice(sorted(running)), choose.randrange(3))
    if kind == "joined" and running:
        return WorkerJoined(choose.choice(sorted(running)))
    if kind == "leave" and running:
        return WorkerLeft(choose.choice(sorted(running)))
    if kind == "exit" and running:
        rank = choose.choice(sorted(running))
        running.remove(rank)
        leftovers = choose.random() < 0.3
        if leftovers:
            left.add(rank)
        return Exited(rank, choose.choice([0, 0, 0, 1, -SIGKILL]), choose.random() < 0.5, leftovers)
    if kind == "vacate" and left:
        return Vacated(left.pop())
    if kind == "interrupt" and choose.random() < 0.1:
        return InterruptGroup(choose.choice([SIGINT, SIGQUIT, SIGTERM, SIGHUP]))
    return GroupTimer()


def test_any_story_ends_in_time() -> None:
    """After the first failure or interrupt it is over within the farewell and twice the patience, whatever happens."""
    for seed in range(1000):
        play_until_finished(random.Random(seed), f"seed {seed}")


def play_until_finished(choose: random.Random, seed: str) -> None:
    running, left = set(range(choose.randint(1, 5))), set[int]()
    group = Story(len(running)).group
    now_ns, timer_ns, trouble_ns = 0, 10**18, None
    while group.phase != GroupPhase.FINISHED:
        phase_before = group.phase
        now_ns = min(now_ns + choose.randrange(10**9), timer_ns)
        event = GroupTimer() if now_ns == timer_ns else random_event(choose, running, left)
        for effect in group.step(now_ns, event):
            if isinstance(effect, SetGroupTimer):
                assert effect.at_ns > now_ns, f"a timer in the past would make the shell spin ({seed})"
                timer_ns = effect.at_ns
        assert group.phase >= phase_before, seed
        if trouble_ns is None and group.phase != GroupPhase.RUNNING:
            trouble_ns = now_ns
    assert trouble_ns is None or now_ns <= trouble_ns + 15 * 10**9, seed


# Workers that continue.

AGAIN = Policy(starts_again=True, farewell_ns=PATIENCE_NS)
NEXT = StopGroup("the round is over", keeps=True)


def continuing(ranks: int, policy: Policy = AGAIN, others: int = 0) -> Story:
    """A group in which all workers continue, but for the last `others`."""
    story = Story(ranks, policy)
    for rank in range(ranks - others):
        assert story.at(0.5, WorkerContinues(rank)) == []
    assert story.group.survivors == tuple(range(ranks - others))
    return story


def test_who_does_not_leave_the_world_in_time_is_killed() -> None:
    story = continuing(3, others=1)
    unsure = StopGroup("the store is silent", at_once=True, keeps=True)
    assert story.at(1, unsure) == ["signal 9 to rank 2", "timer at 1.5"]
    assert story.at(1.1, Exited(2, -SIGKILL)) == []
    assert story.at(1.2, WorkerAwaits(0)) == []
    assert story.at(1.5, GroupTimer()) == ["signal 9 to rank 1", "timer at 6.5"]
    assert story.at(1.6, Exited(1, -SIGKILL)) == ["settled"]
    assert story.group.survivors == (0,)


def test_those_that_have_left_the_world_live_on() -> None:
    story = continuing(2)
    assert story.at(1, WorkerAwaits(0)) == ["timer at 301"]
    assert story.at(2, StopGroup("the store is silent", at_once=True, keeps=True)) == ["timer at 2.5"]
    assert story.at(2.1, WorkerAwaits(1)) == ["settled"]
    assert story.at(2.5, GroupTimer()) == []
    assert story.group.survivors == (0, 1)


def test_a_death_is_not_the_end_of_those_that_continue() -> None:
    story = continuing(4)
    assert story.at(1, Exited(2, -SIGKILL)) == []
    assert (story.group.cause, story.group.survivors) == (2, (0, 1, 3))
    assert story.at(1.01, NEXT) == ["settled"]
    assert story.group.phase is GroupPhase.RUNNING


def test_two_deaths_at_once() -> None:
    story = continuing(4)
    story.at(1, Exited(2, -SIGKILL))
    assert story.at(1, Exited(0, -SIGKILL)) == []
    assert story.group.cause == 2
    assert story.at(1, NEXT) == ["settled"]
    assert story.group.survivors == (1, 3)


def test_the_death_of_all_is_the_end() -> None:
    story = continuing(2)
    story.at(1, Exited(1, -SIGKILL))
    assert story.at(1.1, Exited(0, -SIGKILL)) == ["finish 137 because of 1"]


def test_the_death_of_all_that_were_kept_is_the_end() -> None:
    story = continuing(2)
    story.at(1, Exited(1, 3))
    assert story.at(1, NEXT) == ["settled"]
    assert story.at(1.1, Exited(0, -SIGKILL)) == ["finish 3 because of 1"]


def test_workers_that_do_not_continue_are_ended() -> None:
    story = continuing(4, others=2)
    assert story.at(1, Exited(0, 3)) == ["signal 15 to ranks 2, 3", "timer at 6"]
    assert story.at(1, NEXT) == []
    assert story.at(1.1, Exited(2, -SIGTERM)) == []
    assert story.at(1.2, Exited(3, -SIGTERM)) == ["settled"]
    assert story.group.survivors == (1,)
    assert story.at(6, GroupTimer()) == []


def test_those_that_hang_are_killed_and_the_others_wait_for_that() -> None:
    story = continuing(3, others=1)
    story.at(1, Exited(0, 3))
    assert story.at(6, GroupTimer()) == ["signal 9 to rank 2", "timer at 11"]
    assert story.at(6.1, NEXT) == []
    assert story.at(6.2, Exited(2, -SIGKILL)) == ["settled"]


def test_exit_handlers_have_a_second_while_others_wait() -> None:
    story = continuing(2)
    assert story.at(1, WorkerRaised(1, "ValueError")) == ["timer at 6"]
    assert story.at(1, NEXT) == ["timer at 2"]
    assert story.at(2, GroupTimer()) == ["signal 9 to rank 1", "timer at 7"]
    assert story.at(2, Exited(1, -SIGKILL)) == ["settled"]


def test_leftovers_of_a_dead_worker_are_ended_while_others_wait() -> None:
    story = continuing(2)
    assert story.at(1, Exited(1, -SIGKILL, leftovers=True)) == ["signal 15 to rank 1", "timer at 2"]
    assert story.at(1, NEXT) == []
    assert story.at(1.5, Vacated(1)) == ["settled"]


def test_a_failure_that_blames_a_peer_counts_after_a_while() -> None:
    story = continuing(2)
    assert story.at(1, Exited(1, 1, blames_peer=True)) == ["timer at 4"]
    assert story.group.cause is None
    assert story.at(4, GroupTimer()) == []
    assert story.group.cause == 1
    assert story.at(4, NEXT) == ["settled"]


def test_without_another_start_those_that_continue_are_asked_to_end() -> None:
    story = continuing(3, Policy(farewell_ns=PATIENCE_NS))
    assert story.at(1, Exited(2, -SIGKILL)) == ["signal 15 to ranks 0, 1", "timer at 6"]
    story.at(1.1, Exited(0, -SIGTERM))
    assert story.at(1.2, Exited(1, -SIGTERM)) == ["finish 137 because of 2"]


def test_no_round_follows() -> None:
    story = continuing(2)
    story.at(1, Exited(1, 3))
    assert story.at(2, NoRoundFollows("the job is over")) == ["signal 15 to rank 0", "timer at 7"]
    assert story.at(7, GroupTimer()) == ["signal 9 to rank 0", "timer at 12"]
    assert story.at(7.1, Exited(0, -SIGKILL)) == ["finish 3 because of 1"]


@pytest.mark.parametrize(
    ("event", "effects"),
    [
        (StopGroup("the job is over"), ["signal 15 to rank 0", "timer at 7"]),
        (StopGroup("the others have gone on", at_once=True), ["signal 9 to rank 0", "timer at 7"]),
        (InterruptGroup(SIGINT), ["signal 2 to rank 0", "timer at 7"]),
    ],
)
def test_those_that_wait_for_a_round_can_be_ended(event: Event, effects: list[str]) -> None:
    story = continuing(2)
    story.at(1, Exited(1, 3))
    story.at(1, NEXT)
    assert story.at(2, event) == effects
    assert story.at(3, Exited(0, -SIGTERM)) == ["finish 3 because of 1"]


def test_the_exception_in_the_error_file_is_named() -> None:
    story = Story(1)
    story.at(0.5, Exited(0, 3, what="ValueError: bad sample 17"))
    assert story.reason == "rank 0 (pid 100) failed with exit code 3 after 0.5 s (ValueError: bad sample 17)"


def test_a_worker_of_an_earlier_run_keeps_its_age() -> None:
    group = WorkerGroup([0, 1], AGAIN)
    group.step(10**9, Started(0, 100, since_ns=0, continues=True))
    group.step(10**9, Started(1, 101))
    assert group.survivors == (0,)
    assert group.step(2 * 10**9, Exited(0, -SIGKILL)) != []
    assert (
        group.workers[0].describe() == "rank 0 (pid 100) was killed by SIGKILL after 2.0 s (out of memory?)"
    )


def test_a_worker_that_comes_when_all_have_finished_is_ended() -> None:
    story = continuing(3, others=1)
    story.at(1, WorkerCompleted(0))
    story.at(1, WorkerCompleted(1))
    assert story.at(2, Exited(0, 0)) == []
    assert story.at(2, Exited(1, 0)) == []
    assert story.at(3, WorkerJoins(2, 0)) == ["signal 9 to rank 2"]
    assert story.at(3.1, Exited(2, -SIGKILL)) == ["finish 0"]


def test_a_worker_that_stays_in_a_world_that_others_have_left_fails() -> None:
    story = Story(3, Policy(straggler_ns=60 * 10**9))
    for rank in range(3):
        story.at(0.5, WorkerContinues(rank))
    assert story.at(1, WorkerAwaits(0)) == ["timer at 61"]
    assert story.at(2, WorkerAwaits(2)) == []
    assert story.at(30, GroupTimer()) == ["timer at 61"]
    assert story.at(61, GroupTimer()) == ["signal 9 to rank 1"]
    assert story.reason == "still in the world that ranks 0, 2 left 60 s ago"
    story.at(61.1, Exited(1, -9))
    assert story.group.cause == 1, "its end counts as a failure"
    assert story.group.workers[1].describe() == (
        "rank 1 (pid 101) was killed by the launcher after 61.1 s, because it was still in the world that ranks 0, 2 "
        "had left 60 s before (--start-timeout): state.end_stuck_steps() prints the stacks of such a worker"
    )


def test_workers_that_have_all_left_are_no_stragglers() -> None:
    story = Story(2, Policy(straggler_ns=60 * 10**9))
    for rank in range(2):
        story.at(0.5, WorkerContinues(rank))
        story.at(1, WorkerAwaits(rank))
    assert story.at(61, GroupTimer()) == []


def test_nobody_misses_a_worker_after_the_end_of_the_training() -> None:
    story = Story(1)
    story.at(0.5, WorkerContinues(0))
    story.at(1, WorkerCompleted(0))
    assert story.at(2, Exited(0, 0)) == ["finish 0"]
    assert story.at(3, WorkerMissed(0, 5)) == []


def completed(ranks: int) -> Story:
    """Workers that would start again, and have finished a training."""
    story = continuing(ranks)
    for rank in range(ranks):
        story.at(1, WorkerCompleted(rank))
    return story


def test_a_failure_after_the_training_is_the_end_of_the_job() -> None:
    story = completed(3)
    assert story.at(2, Exited(1, 1)) == ["timer at 5"]
    assert story.group.cause is None, "no other round begins"
    assert story.at(3, Exited(0, 0)) == []
    assert story.at(5, GroupTimer()) == ["signal 15 to rank 2", "timer at 10"]
    assert story.at(6, Exited(2, 0)) == ["finish 1 because of 1"]
    assert story.reason.endswith("; all ranks had finished their training, so it is not repeated")


def test_a_worker_that_a_signal_kills_after_the_training_is_the_cause_of_others() -> None:
    story = completed(3)
    assert story.at(2, Exited(1, -SIGKILL)) == []
    assert story.at(2.1, Exited(0, 1, blames_peer=True)) == ["timer at 5.1"]
    assert story.at(5.1, GroupTimer()) == ["signal 15 to rank 2", "timer at 10.1"]
    assert story.at(6, Exited(2, 0)) == ["finish 137 because of 1"]


def test_a_failure_after_the_training_is_a_loss_for_the_next_one() -> None:
    story = completed(2)
    assert story.at(2, Exited(1, 1)) == ["timer at 5"]
    story.at(2.1, WorkerContinues(0))
    assert story.group.cause == 1
    assert story.at(5, GroupTimer()) == []


def test_a_worker_that_begins_another_training_is_needed_in_it() -> None:
    story = Story(2)
    for rank in range(2):
        story.at(0.5, WorkerContinues(rank))
        story.at(1, WorkerCompleted(rank))
        story.at(1.5, WorkerContinues(rank))
    assert story.at(2, Exited(0, 0)) == []
    story.at(3, WorkerJoins(1, 0))
    assert story.group.cause == 0
