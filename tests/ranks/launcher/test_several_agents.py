"""Several agents on this machine, with real workers: nodes fail, freeze, leave, return and are lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher, end

# A worker says which round it is in, and then waits for the test to decide.
HERE = """\
size, attempt = int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"here {rank} of {size} attempt {attempt} pid {os.getpid()}\\n".encode())
"""
UNTIL_DONE = "while not os.path.exists('done'): time.sleep(0.02)\n"


class Here:
    """A worker's report of itself."""

    def __init__(self, line: str) -> None:
        found = re.search(r"here (\d+) of (\d+) attempt (\d+) pid (\d+)", line)
        assert found, line
        self.rank, self.size, self.attempt, self.pid = map(int, found.groups())


class Nodes:
    """The agents of one job; the first one serves the store."""

    def __init__(self, folder: Path) -> None:
        self.launcher = Launcher(folder)
        self.port = free_port("127.0.0.1")

    def start(
        self, *words: str, nodes: str = "1:2", conf: str = "keep_alive_interval=5"
    ) -> subprocess.Popen[bytes]:
        is_host = f"is_host={str(not self.launcher.started).lower()}"
        return self.launcher.start(
            *("--nnodes", nodes, "--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{self.port}"),
            *("--rdzv-id", "job", "--rdzv-conf", f"{is_host},{conf}", *words),
            "script.py",
        )

    def done(self, rank: int | None = None) -> None:
        """Let all workers end, or only one."""
        (self.launcher.folder / ("done" if rank is None else f"done {rank}")).touch()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.launcher.started:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[bytes], size: int, workers: int = 1) -> list[Here]:
    """Return the reports of all workers of a node in a world of this size."""
    assert process.stdout is not None
    found: dict[int, Here] = {}
    while len(found) < workers:
        line = process.stdout.readline().decode()
        assert line, f"the agent has ended with {process.wait(HANGING_S)}"
        here = Here(line)
        if here.size == size:
            found[here.rank] = here
    return [found[rank] for rank in sorted(found)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def await_gone(pid: int) -> None:
    deadline = time.monotonic() + HANGING_S
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_of_two_nodes_and_one_end(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + "if rank: sys.exit()\n" + UNTIL_DONE)
    first, second = (nodes.start("-n", "2", nodes="2") for _ in range(2))
    heard = hear(first, 4, 2) + hear(second, 4, 2)
    assert sorted(here.rank for here in heard) == [0, 1, 2, 3]
    slow, early = (first, second) if heard[0].rank == 0 else (second, first)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits for the other node, whose worker goes on
        early.wait(1)
    nodes.done()
    assert end(slow)[0] == 0
    assert end(early)[0] == 0


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_ends_before_ranks_of_another_node_have_joined_has_failed(
    nodes: Nodes, alone: bool
) -> None:
    """Also if all workers of its node have ended, so that the node has reported that they have succeeded."""
    others = "" if alone else "if rank == 3: time.sleep(600)\n"
    nodes.launcher.script(others + "if rank >= 2: sys.exit()\nimport ronde\nronde.init()\nprint('never')")
    ends = list(map(end, [nodes.start("-n", "2", nodes="2") for _ in range(2)]))
    for code, out, err in ends:
        assert (code, "never" in out) == (1, False), err
        assert re.search(
            r"rank [23] \(pid \d+\), for which rank [01] waits, ended with exit code 0 .* without calling ronde.init",
            err,
        ), err


@pytest.mark.slow
def test_the_ranks_of_one_node_may_make_a_world_of_their_own(nodes: Nodes) -> None:
    """Then they do not wait for a worker of another node, which has ended."""
    nodes.launcher.script(
        """
        if rank < 2: sys.exit()
        os.environ |= {"WORLD_SIZE": "2", "RANK": os.environ["LOCAL_RANK"]}
        if rank == 3: time.sleep(4)  # the other rank waits longer than the agent takes to ask
        import ronde
        ronde.init()
        print(ronde.size())
        """
    )
    assert [code for code, *_ in map(end, [nodes.start("-n", "2", nodes="2") for _ in range(2)])] == [0, 0]


@pytest.mark.slow
def test_a_rank_that_ends_too_early_costs_an_elastic_job_a_restart(nodes: Nodes) -> None:
    nodes.launcher.script(
        HERE + "if rank == 1 and attempt == 0: sys.exit()\nimport ronde\nronde.init()\nprint('joined')\n"
        "os.write(1, b'joined\\n')"
    )
    started = [nodes.start("--max-restarts", "1") for _ in range(2)]
    ends = list(map(end, started))
    assert [code for code, *_ in ends] == [0, 0], ends
    assert all("joined" in out for _, out, _ in ends)
    assert any("for which rank 0 waits, ended with exit code 0" in err for *_, err in ends), ends
    assert all("starting the worker of this node again (restart 1 of 1)" in err for *_, err in ends), ends


@pytest.mark.slow
def test_nodes_need_no_key_where_they_share_the_users_file(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node with another file is refused with the reason. With an insecure key each node warns once."""
    nodes.launcher.script("pass")
    monkeypatch.delenv("RONDE_JOB_KEY", raising=False)
    for code, _, err in map(end, [nodes.start(nodes="2") for _ in range(2)]):
        assert (code, err.count("key")) == (0, 0), err
    nodes.launcher.started.clear()
    for code, _, err in map(end, [nodes.start("--insecure-job-key", nodes="2") for _ in range(2)]):
        assert (code, err.count("the job's name is its key")) == (0, 1), err
    nodes.launcher.started.clear()
    first = nodes.start(nodes="2")
    assert first.stderr is not None
    assert b"waiting for the others" in first.stderr.readline()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, _, err = end(nodes.start(nodes="2"))
    assert code == 2
    assert re.search(
        r"comes from \S+/job.key on .* a machine with another such file; then copy the file", err
    ), err
    os.kill(first.pid, signal.SIGINT)
    assert end(first)[0] == 130


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(nodes: Nodes) -> None:
    """Ranks meet by Ronde in each round; the survivor's workers lose their peers, which does not count as a failure."""
    nodes.launcher.script(
        HERE.replace("os.write", "import numpy, ronde\nronde.init()\nos.write")
        + """
while True:
    total = ronde.world().allreduce(numpy.array([1.0, os.path.exists("done")]), op=ronde.Sum)
    if total[1] == size: break
    time.sleep(0.01)
"""
    )
    first, second = (nodes.start("-n", "2") for _ in range(2))
    heard = hear(first, 4, 2)
    victims = hear(second, 4, 2)
    second.kill()
    for victim in victims:
        await_gone(victim.pid)
    alone = hear(first, 2, 2)
    assert [here.rank for here in alone] == [0, 1]
    assert not {here.pid for here in alone} & {here.pid for here in heard}
    third = nodes.start("-n", "2")
    assert {here.attempt for here in hear(first, 4, 2) + hear(third, 4, 2)} == {0}
    nodes.done()
    code, _, err = end(first)
    assert (code, end(third)[0]) == (0, 0)
    assert err.count("starting again without") == 1, err
    assert re.search(r"ronde: \S+ \(node [01]\) .*; starting again without", err), err
    assert err.count("starting again with more") == 1, err


def test_a_node_for_which_the_job_is_full_has_an_exit_code_of_its_own(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + UNTIL_DONE)
    both = [nodes.start("-n", "1", nodes="2") for _ in range(2)]
    for each in both:
        hear(each, 2)
    third = nodes.start("-n", "1", nodes="2")
    time.sleep(2)  # it has found the job by then
    nodes.done()
    assert [end(each)[0] for each in both] == [0, 0]
    code, _, err = end(third)
    assert code == 4
    assert "this node was not needed, since the job was full" in err
    assert "--rdzv-id" in err


@pytest.mark.slow
def test_a_node_that_replaces_one_that_had_succeeded_is_no_surplus(nodes: Nodes) -> None:
    waits = "not os.path.exists('done') and not os.path.exists(f'done {rank}')"
    nodes.launcher.script(f"{HERE}while {waits}: time.sleep(0.02)\n")
    first = nodes.start("-n", "1", nodes="2")
    second = nodes.start("-n", "1", nodes="2")
    hear(first, 2)
    (worker,) = hear(second, 2)
    nodes.done(worker.rank)
    await_gone(worker.pid)
    time.sleep(2)  # the others know by then that it has succeeded
    second.kill()
    third = nodes.start("-n", "1", nodes="2")
    time.sleep(2)  # it has found the job by then
    nodes.done()
    assert end(first)[0] == 0
    code, _, err = end(third)
    assert code == 0
    assert "this node was not needed" in err
    assert "the job was full" not in err


def test_the_node_that_serves_the_store_is_lost(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + UNTIL_DONE)
    first, second = (nodes.start("-n", "1") for _ in range(2))
    hear(first, 2)
    hear(second, 2)
    first.kill()
    assert hear(second, 1)[0].rank == 0
    nodes.done()
    assert end(second)[0] == 0


def test_all_nodes_report_a_failure(nodes: Nodes) -> None:
    nodes.launcher.script(
        HERE
        + """
open(f"{attempt} {rank}", "w").close()
while rank != 3 or not all(os.path.exists(f"{attempt} {each}") for each in range(size)): time.sleep(0.02)
raise ValueError(f"attempt {attempt}")
"""
    )
    agents = [nodes.start("-n", "2", "--max-restarts", "1", nodes="2") for _ in range(2)]
    for code, out, err in map(end, agents):
        assert code == 1
        assert len(re.findall("here .* attempt 0", out)) == 2
        assert len(re.findall("here .* attempt 1", out)) == 2
        assert "(restart 1 of 1)\n" in err
        report = err[err.rindex("ronde: rank 3 (pid ") :]
        assert "; the workers had been started again once before\n" in report
        assert report.endswith("    ValueError: attempt 1\n")


def test_a_node_leaves_after_a_signal(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + UNTIL_DONE)
    first, second = (nodes.start("-n", "1") for _ in range(2))
    hear(first, 2)
    hear(second, 2)
    second.terminate()
    assert end(second)[0] == 143
    assert hear(first, 1)[0].rank == 0
    nodes.done()
    assert end(first)[0] == 0


def test_ctrl_c_at_one_node_ends_the_job(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + "time.sleep(600)")
    first, second = (nodes.start("-n", "1") for _ in range(2))
    hear(first, 2)
    hear(second, 2)
    second.send_signal(signal.SIGINT)
    assert end(second)[0] == 130
    code, _, err = end(first)
    assert code == 1
    assert "interrupted by Ctrl-C" in err


@pytest.mark.slow
def test_a_frozen_agent_is_left_out_and_comes_back(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + UNTIL_DONE)
    conf = "keep_alive_interval=0.3"
    first, second = (nodes.start("-n", "1", conf=conf) for _ in range(2))
    hear(first, 2)
    (frozen,) = hear(second, 2)
    second.send_signal(signal.SIGSTOP)
    hear(first, 1)
    second.send_signal(signal.SIGCONT)
    await_gone(frozen.pid)  # its round has ended without it
    hear(first, 2)
    hear(second, 2)
    nodes.done()
    assert (end(first)[0], end(second)[0]) == (0, 0)


@pytest.mark.slow
def test_the_node_with_the_store_waits_beyond_the_exit_barrier(nodes: Nodes) -> None:
    nodes.launcher.script(HERE + "if rank == 0: sys.exit()\n" + UNTIL_DONE)
    conf = "exit_barrier_timeout=0.2"
    first, second = (nodes.start("-n", "1", nodes="2", conf=conf) for _ in range(2))
    early, slow = (first, second) if (hear(first, 2) + hear(second, 2))[0].rank == 0 else (second, first)
    with pytest.raises(subprocess.TimeoutExpired):
        early.wait(1.5)
    nodes.done()
    assert end(slow)[0] == 0
    code, _, err = end(early)
    assert code == 0
    assert "waited 0.2 s for those of other nodes, and go on waiting" in err


@pytest.mark.slow
def test_two_jobs_one_after_the_other_in_one_file(nodes: Nodes) -> None:
    nodes.launcher.script(HERE)
    place = ("--rdzv-backend", "file", "--rdzv-endpoint", "meeting")
    for _ in range(2):
        both = [nodes.launcher.start("--nnodes", "2", *place, "script.py") for _ in range(2)]
        assert sorted(hear(agent, 2)[0].rank for agent in both) == [0, 1]
        assert [end(agent)[0] for agent in both] == [0, 0]


def test_a_new_node_serves_the_store_of_a_dead_one(nodes: Nodes) -> None:
    nodes.launcher.script(HERE)
    words = ("--rdzv-backend", "tcp", "--rdzv-endpoint", f"127.0.0.1:{nodes.port}")
    with socket.create_server(("127.0.0.1", nodes.port)) as dying:
        newcomer = nodes.launcher.start(
            "--nnodes", "1:2", *words, "--rdzv-conf", "last_call_timeout=0.2", "script.py"
        )
        dying.accept()[0].close()
    assert hear(newcomer, 1)[0].rank == 0
    assert end(newcomer)[0] == 0


@pytest.mark.slow
def test_a_waiting_agent_that_is_killed_leaves_no_folder(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nodes.launcher.script("pass")
    agent = nodes.start(nodes="2")
    assert agent.stderr is not None
    assert agent.stderr.readline()  # it is there
    assert list(tmp_path.glob("ronde_*"))
    agent.kill()
    deadline = time.monotonic() + HANGING_S
    while list(tmp_path.glob("ronde_*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_enough_nodes_it_says_so(nodes: Nodes) -> None:
    nodes.launcher.script("pass")
    code, out, err = end(nodes.start("-n", "1", nodes="2", conf="join_timeout=1"))
    assert (code, out) == (2, "")
    assert "1 of 2" in err or "2 nodes" in err or "at least 2" in err, err


def test_a_job_of_one_node_at_a_store_with_a_key(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_JOB_KEY", "11" * 32)
    nodes.launcher.script(HERE)
    port = ("--port", str(nodes.port))
    store = subprocess.Popen([sys.executable, "-m", "ronde", "store", "--host", "127.0.0.1", *port])
    try:
        nodes.launcher.started.append(store)
        code, out, err = end(nodes.start(nodes="1"))
        assert (code, out.count("here 0 of 1")) == (0, 1), err
    finally:
        store.kill()


def test_a_wrong_key_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.launcher.script(HERE + UNTIL_DONE)
    monkeypatch.setenv("RONDE_JOB_KEY", "11" * 32)
    first = nodes.start("-n", "1", nodes="2")
    time.sleep(1)  # the second one does not wait for a store that it may not enter
    monkeypatch.setenv("RONDE_JOB_KEY", "22" * 32)
    second = nodes.start("-n", "1", nodes="2")
    code, _, err = end(second)
    assert code == 2
    assert "key" in err
    assert "22" * 32 not in err
    os.kill(first.pid, signal.SIGINT)
    assert end(first)[0] == 130
