"""What ends a step, or keeps a state from being sent, is named with the step, the task and the attribute."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ronde.comqueue import IterationStep, execution, iterate
from ronde.errors import RemoteError, UsageError, WorkerError
from ronde.launch.clusters.cluster import SlotEvents, Ticket
from ronde.launch.clusters.local import LocalCluster

PLACES = ["local:2", "threads:2", pytest.param("cluster", marks=pytest.mark.slow)]


def run(step: Callable[[IterationStep], Any], on: str = "local:2", **more: Any) -> Any:
    more = {"state": {"w": 0.0}, "data": np.ones((9, 2)), "max_iter": 5, **more}
    return iterate(step, on=LocalCluster(2) if on == "cluster" else on, **more)


def sum_ones(c: IterationStep) -> None:
    c.state.w = c.sum(1.0)


@pytest.mark.parametrize("on", PLACES)
def test_an_attribute_of_the_state_that_cannot_be_sent_is_named(on: str) -> None:
    state = {"w": 0.0, "guard": {"lock": threading.Lock()}}
    with pytest.raises(
        UsageError, match="object 'state' cannot be sent to tasks: item 'lock' of the attribute 'guard'"
    ):
        run(sum_ones, on, state=state)


class StoppedCluster(LocalCluster):
    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        raise UsageError("the session has stopped")


def test_after_another_error_of_a_cluster_nothing_is_pickled_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(execution, "describe_unsendable_part", lambda *args: searched.append(args))
    with pytest.raises(UsageError, match="the session has stopped"):
        iterate(sum_ones, data=np.ones((9, 2)), state={"w": 0.0}, max_iter=5, on=StoppedCluster(2))
    assert not searched


def set_lock_in_step_3(c: IterationStep) -> None:
    sum_ones(c)
    if c.step_no == 3:
        c.state.lock = threading.Lock()


def test_so_is_one_that_a_step_has_set_with_the_step() -> None:
    with pytest.raises(
        RemoteError, match=r"attribute 'lock' of the state cannot be sent .* step 3 gave it its type"
    ):
        run(set_lock_in_step_3)


def test_a_checkpoint_names_it_too() -> None:
    with pytest.raises(
        RemoteError, match=r"the attribute 'lock' of object 'state' is of type _thread\.lock, after step 3"
    ):
        run(set_lock_in_step_3, checkpoint_every=1)


def delete_lock(c: IterationStep) -> None:
    del c.state.lock


def test_it_may_be_gone_at_the_end() -> None:
    assert run(set_lock_in_step_3, finish=delete_lock).state.w == 2.0


def exit_in_step_3(c: IterationStep) -> None:
    if c.step_no == 3 and c.task_id == 1:
        sys.exit(3)
    sum_ones(c)


def test_an_exit_in_a_step_is_an_error_with_step_and_line() -> None:
    with pytest.raises(WorkerError) as caught:
        run(exit_in_step_3)
    message = r"exit_in_step_3 in step 3 on task 1 exited: SystemExit\(3\)"
    assert re.search(message, str(caught.value).splitlines()[0])
    assert "sys.exit(3)" in caught.value.traceback_text


def test_so_it_is_in_a_thread() -> None:
    with pytest.raises(RemoteError, match=r"task 1 failed: SystemExit\(3\) in exit_in_step_3 in step 3"):
        run(exit_in_step_3, "threads:2")


def die_in_step_3(c: IterationStep) -> None:
    if c.step_no == 3 and c.task_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sum_ones(c)


@pytest.mark.parametrize("on", ["local:2", pytest.param("cluster", marks=pytest.mark.slow)])
def test_a_task_that_dies_in_each_attempt_is_reported_with_attempts_and_step(on: str) -> None:
    with pytest.raises(RemoteError, match=r"SIGKILL") as caught:
        run(die_in_step_3, on, checkpoint_every=1, max_restarts=1)
    assert caught.value.__notes__ == [
        "The tasks have started 2 times. The last checkpoint is of step 2, so the task was lost in step 3 or later."
    ]


def interrupt_in_step_3(c: IterationStep) -> None:
    if c.step_no == 3 and c.task_id == 1:
        raise KeyboardInterrupt
    sum_ones(c)


def test_an_interrupt_that_a_step_raises_starts_nothing_again(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerError) as caught:
        run(interrupt_in_step_3, checkpoint_every=1)
    assert "interrupted: interrupt_in_step_3 in step 3 on task 1" in str(caught.value)
    assert "start again" not in caplog.text
