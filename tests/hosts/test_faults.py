"""Faults between two hosts with two ranks each: who is lost is named on both; who is only stopped is waited for."""

from __future__ import annotations

import socket
import time

import pytest
from tests.ranks.communicator import test_faults as programs

from ronde.testing import faults
from ronde.testing.hosts import Hosts
from ronde.testing.ranks import Job, Outcome

pytestmark = pytest.mark.quiet  # a silence of some seconds is a death

PEER_TIMEOUT_S = 3


def start(two: Hosts, seconds: float | None = None, ipv6: bool = False) -> Job:
    """Four ranks that reduce until there is an error, or for so long; all of them are at it."""
    environ = {"RONDE_PEER_TIMEOUT": str(PEER_TIMEOUT_S), "RONDE_TIMEOUT": "60"}
    if seconds is None:
        job = two.start(programs.reduce_until_error, 32, environ=environ, ipv6=ipv6)
    else:
        job = two.start(programs.reduce_for, seconds, 8, environ=environ, ipv6=ipv6)
    for rank in range(4):
        job.told(rank)
    time.sleep(0.2)
    return job


def check_lost(outcomes: list[Outcome], lost: set[int], since_s: float) -> float:
    """Each of these ranks has raised PeerLostError for one of the lost; returns how late the last one was."""
    late_s = 0.0
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback_text
        first, second = outcome.value
        assert (first.kind, second.kind) == ("PeerLostError", "PeerLostError")
        assert first.rank in lost
        assert first.host == socket.gethostname()
        late_s = max(late_s, first.at_s - since_s)
    return late_s


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_killed_rank_is_named_on_both_hosts(ipv6: bool) -> None:
    with Hosts(2, ranks_per_host=2) as two, start(two, ipv6=ipv6) as job:
        faults.kill(job.pids[3])
        killed_s = time.monotonic()
        outcomes = job.outcomes()
    assert "died of SIGKILL" in str(outcomes.pop(3).error)
    assert check_lost(outcomes, {3}, killed_s) < programs.SOON_S
    for outcome in outcomes:
        assert outcome.value[0].message.endswith("was lost: its process ended without shutting down")


def test_a_host_whose_cable_is_pulled_is_lost_after_the_peer_timeout() -> None:
    with Hosts(2, ranks_per_host=2) as two, start(two) as job:
        two.disconnect(1)
        disconnected_s = time.monotonic()
        outcomes = job.outcomes()
    # Each host takes the other one for lost.
    late_s = max(
        check_lost(outcomes[:2], {2, 3}, disconnected_s), check_lost(outcomes[2:], {0, 1}, disconnected_s)
    )
    print(f"noticed after {late_s:.1f} s; RONDE_PEER_TIMEOUT is {PEER_TIMEOUT_S} s")
    assert late_s < PEER_TIMEOUT_S + programs.SOON_S
    for outcome in outcomes:
        assert outcome.value[0].message.endswith("was lost: its host cannot be reached any more")


def test_a_cable_that_is_plugged_in_again_in_time_does_no_harm() -> None:
    with Hosts(2, ranks_per_host=2) as two, start(two, seconds=3) as job:
        two.disconnect(1)
        time.sleep(1)
        two.reconnect(1)
        assert min(job.results()) >= 1


def test_a_rank_that_is_stopped_longer_than_the_peer_timeout_is_waited_for() -> None:
    stop_s = 3.0 * PEER_TIMEOUT_S
    with Hosts(2, ranks_per_host=2) as two, start(two, seconds=stop_s) as job:
        with faults.stopped(job.pids[2]):
            time.sleep(stop_s)
        assert min(job.results()) >= 1


def test_a_stopped_rank_is_waited_for_however_much_it_is_told() -> None:
    environ = {"RONDE_PEER_TIMEOUT": str(PEER_TIMEOUT_S)}
    with (
        Hosts(2, ranks_per_host=2) as two,
        two.start(programs.submit_one_by_one, 600, environ=environ) as job,
    ):
        for rank in range(4):
            job.told(rank)
        with faults.stopped(job.pids[0]):
            time.sleep(3.0 * PEER_TIMEOUT_S)
        assert job.results() == [600] * 4
