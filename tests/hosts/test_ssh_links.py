"""`ronde run -H` where hosts cannot be reached, or not any more: who is named, who goes on, and nothing stays."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.hosts import ssh
from tests.hosts.ssh_jobs import World, make_world, wait_for

from ronde.testing.hosts import SWITCH

pytestmark = pytest.mark.skipif(bool(ssh.require()), reason=ssh.require())

# Silence of three seconds is a death.
QUICK = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3")


def discovery(world: World, *hosts: int) -> tuple[str, ...]:
    """Options for a script that finds these hosts, until the file is written anew."""
    offer(world, *hosts)
    script = world.folder / "find.sh"
    script.write_text(f"#!/bin/sh\ncat {world.folder}/there\n")
    script.chmod(0o755)
    return ("--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "4")


def offer(world: World, *hosts: int) -> None:
    new = Path(world.folder / "there.new")
    new.write_text("".join(f"{world.name(host)}:1\n" for host in hosts))
    new.rename(world.folder / "there")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("down", "cannot be reached by ssh: connect to host {name} port 22: Connection refused"),
        ("another key", "cannot be reached by ssh: Host key verification failed."),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(wrong: str, says: str) -> None:
    with make_world(2) as world:
        world.servers.stop(1)
        if wrong == "another key":
            world.servers.change_key(1)
            world.servers.start(1)
        code, out, err = world.run("-H", world.listed(0, 1), str(world.program), "sleep")
        wait_for(world.is_empty)
        name = world.name(1)
    assert (code, out) == (2, "")
    assert err == f"ronde: host {name}: {says.format(name=name)}\n"


def test_a_host_that_says_nothing_is_given_up() -> None:
    with make_world(2) as world:
        world.hosts.disconnect(1)
        hosts = world.listed(0, 1)
        code, out, err = world.run("--start-timeout", "5", "-H", hosts, str(world.program), "sleep")
        wait_for(world.is_empty)
        name = world.name(1)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"ronde: host {name}: ")  # no answer, or no route


def test_a_cut_link_ends_a_job_that_needs_all_hosts() -> None:
    with make_world(3) as world:
        with world.start(*QUICK, "-H", world.listed(0, 1, 2), str(world.program), "sleep") as job:
            job.says("rank", 3)
            world.hosts.disconnect(2)
            code, _, err = job.end()
            wait_for(world.is_empty)  # also where nobody can reach
        assert code == 1
        assert world.name(2) in err.splitlines()[-1]


def test_a_cut_link_leaves_a_smaller_job_that_grows_again() -> None:
    with make_world(3) as world:
        options = (*QUICK, *discovery(world, 0, 1, 2), "--min-np", "2")
        with world.start(*options, str(world.program), "sleep") as job:
            job.says("of 3", 3)
            world.hosts.disconnect(1)
            job.says("of 2", 2)
            wait_for(lambda: not world.processes(1))
            world.hosts.reconnect(1)
            job.says("of 3", 6)
            job.interrupt()
            assert job.end()[0] == 130
        wait_for(world.is_empty)


def test_a_host_that_hears_and_is_not_heard_counts_as_cut_off() -> None:
    with make_world(2) as world:
        options = (*QUICK, *discovery(world, 0, 1), "--min-np", "1")
        with world.start(*options, str(world.program), "sleep") as job:
            job.says("of 2", 2)
            world.hosts.block(1, SWITCH)
            job.says("of 1")
            wait_for(lambda: not world.processes(1))
            job.interrupt()
            assert job.end()[0] == 130
        wait_for(world.is_empty)


def test_hosts_are_added_and_removed_while_the_job_runs() -> None:
    with make_world(3) as world:
        with world.start(*discovery(world, 0), "--min-np", "1", str(world.program), "sleep") as job:
            job.says("rank 0 of 1 on host-0")
            offer(world, 0, 2)
            job.says("rank 1 of 2 on host-2")
            offer(world, 2)
            job.says("rank 0 of 1 on host-2")
            wait_for(lambda: not world.processes(0))
            job.interrupt()
            assert job.end()[0] == 130
        wait_for(world.is_empty)


def test_a_killed_agent_takes_its_workers_with_it_and_is_started_again() -> None:
    with make_world(2) as world:
        with world.start(*discovery(world, 0, 1), "--min-np", "1", str(world.program), "sleep") as job:
            job.says("of 2", 2)
            world.signal_agent(1)
            job.says("of 1")
            job.says("of 2", 4)
            job.interrupt()
            assert job.end()[0] == 130
        assert (
            "host " + world.name(1) + ": the connection by ssh broke, or its agent was killed" in job.last_err
        )
        wait_for(world.is_empty)


def test_a_frozen_agent_ends_a_job_that_needs_all_hosts() -> None:
    with make_world(2) as world:
        with world.start(*QUICK, "-H", world.listed(0, 1), str(world.program), "sleep") as job:
            job.says("rank", 2)
            world.signal_agent(1, signal.SIGSTOP)
            code, _, err = job.end()
        world.signal_agent(1, signal.SIGCONT)
        wait_for(world.is_empty)
    assert code == 1
    assert "was silent for 3 s, and nobody starts it again: 1 of 2 nodes is left" in err.splitlines()[-1]


def test_a_link_that_is_late_and_slow_is_no_reason_to_fail() -> None:
    with make_world(2, rate="2mbit") as world, world.hosts.delayed(1, 25):
        code, out, err = world.run("-H", world.listed(0, 1), str(world.program), "reduce")
        wait_for(world.is_empty)
    assert code == 0, err
    assert out.count("sum 2") == 2
