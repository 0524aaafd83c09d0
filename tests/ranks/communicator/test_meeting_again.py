"""Ranks with different pasts form a world: survivors, fresh processes, ranks that have raised or that come late."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.ports import free_port

import ronde
from ronde import settings
from ronde.comm import world as comm
from ronde.testing import ranks
from ronde.testing.ranks import Place

FRESH = f"import {__name__} as me; me.join()"


def join() -> float:
    """Join, do a collective and leave; its result."""
    ronde.init(store=settings.environment().get("FILE_STORE"))
    total: float = ronde.allreduce(np.ones(1), op=ronde.Sum, name="a")[0]
    ronde.barrier()
    ronde.shutdown()
    return total


def my_rank() -> int:
    return int(settings.environment()["RANK"])


def join_in_a_fresh_process() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**settings.environment(), "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", FRESH], check=True, env=environ)


def join_three_times(replaced: int) -> None:
    """One rank is another process each time."""
    for number in range(3):
        if my_rank() == replaced:
            join_in_a_fresh_process()
        else:
            assert join() == 3, number


@pytest.mark.parametrize(
    ("store", "replaced"),
    [
        ("launcher", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("rank 0", 2), ("rank 0", 0), ("file", 1)]
        ),
    ],
)
def test_a_fresh_process_takes_the_place_of_a_rank(store: str, replaced: int, tmp_path: Path) -> None:
    environ = {}
    if store == "rank 0":
        environ = {"RONDE_STORE": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif store == "file":
        environ = {"RONDE_STORE": "", "FILE_STORE": f"file:{tmp_path}/store"}
    ranks.run(join_three_times, 3, replaced, environ=environ)


def raise_in_init(how: str) -> tuple[str, str, float]:
    """Rank 2 raises in `init`; what each rank raises, and what they have in common when all call `init` again."""
    wanted: dict[str, Any] = {}
    connecting: AbstractContextManager[object] = nullcontext()
    if my_rank() == 2:
        if how == "while they connect":
            # Nobody connects to the highest rank, so only it knows.
            connecting = mock.patch("ronde.comm.bootstrap.open_connections", refuse)
        else:
            wanted["interface"] = "eth77"
    elif my_rank() == 1 and how == "before a rank comes":
        time.sleep(1)
    try:
        with connecting:
            ronde.init(**wanted)
    except (ronde.RondeError, OSError) as error:
        told = type(error).__name__, str(error)
    if how != "while they connect":
        time.sleep(3)  # or a late rank joins the next attempt of the others
    return *told, join()


def refuse(*_: object) -> None:
    raise OSError("no more memory")


@pytest.mark.parametrize(
    "how",
    [
        "while they connect",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ["while they meet", "before a rank comes"]),
    ],
)
def test_a_rank_that_raises_in_init_is_named_by_all_others(how: str) -> None:
    first, second, third = ranks.run(raise_in_init, 3, how)
    reason = "UsageError: there is no network interface 'eth77'"
    if how == "while they connect":
        reason = "OSError: no more memory"
    for kind, message, total in (first, second):
        assert kind == "PeerLostError"
        assert message.startswith(f"rank 2 on {os.uname().nodename} failed in ronde.init(): {reason}")
        assert total == 3
    assert third[0] == reason.partition(":")[0]
    assert third[2] == 3


def interrupt_rank_0_at_the_end() -> float:
    """Rank 0 is interrupted when the world is there, before `init` returns."""
    interrupting: AbstractContextManager[object] = nullcontext()
    if my_rank() == 0:
        interrupting = mock.patch(
            "ronde.comm.world_attempt.WorldAttempt.delete_earlier_epochs", side_effect=KeyboardInterrupt
        )
    with pytest.raises((KeyboardInterrupt, ronde.PeerLostError)) as told, interrupting:
        ronde.init(start_timeout_ns=5 * 10**9)
    assert told.tb, "a traceback that a program keeps has all objects of the failed call"
    return join()


def test_a_rank_that_is_interrupted_at_the_end_of_init_has_left_the_world() -> None:
    assert ranks.run(interrupt_rank_0_at_the_end, 2) == [2, 2]


def come_late() -> float | tuple[int, ...]:
    """Rank 2 comes when the others have given up once."""
    if my_rank() == 2:
        time.sleep(2)
    else:
        with pytest.raises(ronde.TimeoutError) as error:
            ronde.init(start_timeout_ns=10**9)
        assert error.value.missing == (2,)
    return join()


def test_a_rank_that_comes_after_the_others_have_given_up_joins_their_next_attempt() -> None:
    assert ranks.run(come_late, 3) == [3, 3, 3]


def join_and_leave(rounds: int) -> int:
    for _ in range(rounds):
        comm.init()
        comm.shutdown()
    return rounds


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_joining_and_leaving_at_once(transport: str) -> None:
    rounds = 60
    assert ranks.run(join_and_leave, 4, rounds, environ={"RONDE_TRANSPORT": transport}) == [rounds] * 4


def try_to_join() -> str:
    try:
        ronde.init()
    except ronde.RondeError as error:
        time.sleep(3)  # rank 0 may serve the store, and a late rank asks there
        return f"{type(error).__name__}: {error}"
    return "joined"


@pytest.mark.slow
@pytest.mark.parametrize("store", ["launcher", "rank 0"])
def test_two_processes_of_one_rank_are_refused_on_both_sides(store: str) -> None:
    environ = {}
    if store == "rank 0":
        environ = {"RONDE_STORE": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [Place(environ={"RANK": rank}) for rank in ("0", "0", "2")]
    with ranks.start(try_to_join, 3, places=places, environ=environ) as job:
        pids = job.pids
        told = [outcome.value for outcome in job.outcomes()]
    for each, kind in zip(told, ["UsageError", "UsageError", "PeerLostError"]):
        assert each.startswith(f"{kind}: two processes have rank 0 of this job, process "), told
        assert all(f"process {pid} on " in each for pid in pids[:2])
        assert each.endswith("give every process another rank (RANK), or every job another place to meet")


def call_init_again() -> list[str]:
    told = []
    ronde.init(timeout_ns=5 * 10**9)
    calls: list[dict[str, Any]] = [
        {},
        {"timeout_ns": 5 * 10**9},
        {"timeout_ns": 7 * 10**9},
        {"rank": my_rank()},
        {"size": 3},
    ]
    for arguments in calls:
        try:
            ronde.init(**arguments)
            told.append("")
        except ronde.UsageError as error:
            told.append(str(error))
    ronde.shutdown()
    ronde.init(timeout_ns=7 * 10**9)
    return told


def test_a_second_call_of_init_does_nothing_or_names_both_values() -> None:
    for same, equal, other, rank, size in ranks.run(call_init_again, 2):
        assert same == equal == rank == ""
        assert other == (
            "ronde.init() was called again with timeout_ns=7000000000, but the world that this process has joined has "
            "timeout_ns=5000000000: call ronde.shutdown() first, or leave timeout_ns out"
        )
        assert "size=3, but the world that this process has joined has size=2" in size
