"""`ronde run -H`: agents on three hosts by ssh, their output, their end, and nothing that stays of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.hosts import ssh
from tests.hosts.ssh_jobs import World, make_world, wait_for

pytestmark = pytest.mark.skipif(bool(ssh.require()), reason=ssh.require())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with make_world(3) as world:
        yield world


@pytest.fixture(autouse=True)
def nothing_runs_on(world: World) -> Iterator[None]:
    yield
    wait_for(world.is_empty)


def test_ranks_on_three_hosts_reduce(world: World) -> None:
    code, out, err = world.run("-H", world.listed(0, 1, 2, slots=2), str(world.program), "reduce")
    assert (code, err) == (0, "")
    lines = sorted(out.splitlines())
    said = [f"[host-{rank // 2}:{rank}] local {rank % 2} of 2, sum 6" for rank in range(6)]
    said += [f"[host-{rank // 2}:{rank}] rank {rank} of 6 on host-{rank // 2}" for rank in range(6)]
    assert lines == sorted(said)


def test_one_of_the_hosts_starts_the_others(world: World) -> None:
    hosts = f"localhost:1,{world.listed(1, 2)}"
    code, out, err = world.run("-H", hosts, str(world.program), "reduce", host=0)
    assert (code, err) == (0, "")
    assert out.count("sum 3") == 3


def test_a_hostfile_and_fewer_workers_than_slots(world: World) -> None:
    other = world.hosts.ipv6(1)
    (world.folder / "hosts").write_text(f"{world.name(0)} slots=2  # the first\n[{other}] slots=2\n")
    code, out, err = world.run("-n", "3", "--hostfile", "hosts", str(world.program), "reduce")
    assert (code, err) == (0, "")
    assert sorted(line.partition("] ")[2] for line in out.splitlines()) == [
        *("local 0 of 1, sum 3", "local 0 of 2, sum 3", "local 1 of 2, sum 3"),
        "rank 0 of 3 on host-0",
        "rank 1 of 3 on host-0",
        "rank 2 of 3 on host-1",
    ]


def test_the_first_failure_ends_all_and_is_told_once(world: World) -> None:
    code, _, err = world.run("-H", world.listed(0, 1, 2), str(world.program), "fail", "1")
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("ronde: ")]
    assert "failed with exit code 1" in lines[-2]
    assert lines[-2].endswith("on host-1")
    assert lines[-1] == "ronde: the traceback of rank 1 was:"
    assert err.splitlines()[-1] == "    RuntimeError: it is me"


def test_a_rank_that_ends_before_those_of_other_hosts_have_joined_has_failed(world: World) -> None:
    code, _, err = world.run("-H", world.listed(0, 1, 2), str(world.program), "leave", "1")
    assert code == 1
    found = re.search(
        r"rank 1 \(pid .*\), for which rank [02] waits, ended with exit code 0 .* without calling .* on host-1\n",
        err,
    )
    assert found, err


def test_a_restart_is_told_once(world: World) -> None:
    hosts = world.listed(0, 1)
    code, _, err = world.run("--max-restarts", "1", "-H", hosts, str(world.program), "fail", "1")
    assert code == 1
    assert err.count("starting the worker of this node again (restart 1 of 1)\n") == 1
    assert err.count("ronde: the traceback of rank 1 was:") == 1


def test_what_cannot_be_followed_on_a_host_is_one_sentence(world: World) -> None:
    code, out, err = world.run("-H", world.listed(0), "--log-dir", "/proc/logs", str(world.program))
    assert (code, out) == (2, "")
    assert err.startswith(f"ronde: host {world.name(0)}: cannot write logs to /proc/logs: ")
    assert len(err.splitlines()) == 1


def test_ctrl_c_ends_everything_everywhere(world: World) -> None:
    with world.start("-H", world.listed(0, 1), str(world.program), "sleep") as job:
        job.says("rank", 2)
        job.interrupt()
        assert job.end()[0] == 128 + signal.SIGINT


def test_nothing_outlives_the_launcher(world: World) -> None:
    with world.start("-H", world.listed(0, 1), str(world.program), "sleep") as job:
        job.says("rank", 2)
        job.process.kill()
        job.process.wait()
        wait_for(world.is_empty)


def test_the_job_key_is_on_no_command_line(world: World) -> None:
    with world.start("-H", world.listed(0), str(world.program), "sleep") as job:
        job.says("rank")
        for command in world.processes(0).values():
            assert "key" not in command.lower()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end()[0] == 128 + signal.SIGTERM


def test_too_few_slots_are_refused_at_once(world: World) -> None:
    code, _, err = world.run("-H", world.listed(0, 1), "--min-np", "5", str(world.program))
    assert code == 2
    assert "5 workers, the minimum, need as many slots, but " in err
    assert len(err.splitlines()) == 1


def test_an_unknown_host_is_named(world: World) -> None:
    code, _, err = world.run("-H", "nowhere.invalid:2", str(world.program))
    assert code == 2
    assert err.startswith("ronde: host nowhere.invalid: cannot be reached by ssh: Could not resolve hostname")
    assert len(err.splitlines()) == 1


def test_this_machines_name_with_a_domain_needs_no_ssh(world: World) -> None:
    """As `hostname -f` prints it; no sshd runs here."""
    own = socket.gethostname().partition(".")[0]
    names = world.folder / "names"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}.example.org {own}\n")
    view = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names))
    command = (sys.executable, "-m", "ronde", "run", "-H", f"{own}.example.org:2", str(world.program))
    done = subprocess.run(
        [*view, *command], env=world.environ(), check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.count("of 2 on")) == (0, 2), done.stderr
