"""One agent with real workers, which fail, freeze and start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time

import pytest
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher, end

# Each attempt says which it is; the test decides by signals how it ends.
ATTEMPT = """\
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("here", rank, os.getpid(), attempt, flush=True)
"""


class Job:
    """One `ronde run`, whose workers say "here RANK PID ATTEMPT"."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def await_workers(self, count: int) -> dict[int, tuple[int, int]]:
        """Return process and attempt of each rank, once this many more have reported."""
        assert self.process.stdout is not None
        found: dict[int, tuple[int, int]] = {}
        while len(found) < count:
            line = self.process.stdout.readline().decode()
            assert line, f"the job ended with {self.process.wait(HANGING_S)}"
            if match := re.search(r"here (\d+) (\d+) (\d+)", line):
                found[int(match[1])] = int(match[2]), int(match[3])
        return found


# One node: workers are started again.


@pytest.mark.parametrize("workers", [2, 4])
def test_all_workers_start_again_when_one_is_killed(launcher: Launcher, workers: int) -> None:
    launcher.script(ATTEMPT + "if attempt == 0: time.sleep(600)")
    process = launcher.start("-n", str(workers), "--max-restarts", "2", "script.py")
    job = Job(process)
    first = job.await_workers(workers)
    victim = first[workers - 1][0]
    os.kill(victim, signal.SIGKILL)
    second = job.await_workers(workers)
    assert {attempt for _, attempt in second.values()} == {1}
    assert not {pid for pid, _ in first.values()} & {pid for pid, _ in second.values()}
    code, _, err = end(process)
    assert code == 0
    assert re.search(
        rf"ronde: rank {workers - 1} \(pid {victim}\) was killed by SIGKILL .*starting all workers again "
        r"\(restart 1 of 2\)\n",
        err,
    )


@pytest.mark.slow
def test_the_failure_that_ends_it_is_shown_last(launcher: Launcher) -> None:
    launcher.script(ATTEMPT + "if rank == 1: raise ValueError(f'attempt {attempt}')\ntime.sleep(600)")
    code, out, err = launcher.run("-n", "2", "--max-restarts", "1", "script.py")
    assert code == 1
    assert len(re.findall("here 1", out)) == 2
    report = err[err.rindex("ronde: rank 1 (") :]
    assert "failed with exit code 1" in report
    assert "; the workers had been started again once before\n" in report
    assert report.endswith("    ValueError: attempt 1\n")


def test_of_two_exceptions_the_earlier_one_is_shown(launcher: Launcher) -> None:
    launcher.script(
        """
        import ronde
        @ronde.record
        def main():
            if rank == 0:
                while not os.path.exists("raised"): time.sleep(0.01)
            else:
                import atexit
                atexit.register(time.sleep, 1)  # it has raised first, and ends last
                atexit.register(open, "raised", "w")
            raise ValueError(f"of rank {rank}")
        main()
        """
    )
    code, _, err = launcher.run("-n", "2", "script.py")
    assert code == 1
    assert "ronde: rank 1 (pid" in err
    assert err.endswith("    ValueError: of rank 1\n")


@pytest.mark.slow
def test_ronde_meets_anew_in_each_attempt(launcher: Launcher) -> None:
    """Keys of a killed attempt must not reach the next one."""
    launcher.script(
        ATTEMPT
        + textwrap.dedent("""
        import numpy, ronde
        ronde.init()
        world = ronde.world()
        total = int(world.allreduce(numpy.ones(1), op=ronde.Sum)[0])
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and rank == 0:  # in the middle of the next meeting
            ronde.shutdown()
            sys.exit(3)
        world.barrier()
        print("sum", total)
        ronde.shutdown()
        """)
    )
    code, out, err = launcher.run("-n", "3", "--max-restarts", "3", "script.py")
    assert code == 0, err
    assert len(re.findall("sum 3", out)) == 3
    assert "(restart 2 of 3)" in err


def test_a_worker_that_is_asked_to_stop_has_not_succeeded(launcher: Launcher) -> None:
    launcher.script(
        ATTEMPT
        + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if attempt == 0 and rank == 0: sys.exit(5)
        if attempt == 0: time.sleep(600)
        """)
    )
    code, out, _ = launcher.run("-n", "2", "--max-restarts", "1", "script.py")
    assert code == 0
    assert sorted(re.findall(r"here (\d) \d+ 1", out)) == ["0", "1"]


def test_ctrl_c_while_workers_start_again(launcher: Launcher) -> None:
    launcher.script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("here", rank, os.getpid(), 0, flush=True)
        time.sleep(600)
        """
    )
    process = launcher.start("-n", "2", "--max-restarts", "1", "script.py")
    workers = Job(process).await_workers(2)
    os.kill(workers[0][0], signal.SIGKILL)
    assert process.stderr is not None
    while b"starting all workers again" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    while b"interrupted by Ctrl-C: SIGINT" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130
    assert err == "ronde: Ctrl-C again: SIGKILL to rank 1\nronde: interrupted by Ctrl-C\n"


# A worker that somebody has stopped.


def test_a_frozen_worker_is_reported_and_waited_for(launcher: Launcher) -> None:
    launcher.script(ATTEMPT + "while not os.path.exists('done'): time.sleep(0.05)")
    process = launcher.start("-n", "2", "script.py")
    (pid, _) = Job(process).await_workers(2)[0]
    os.kill(pid, signal.SIGSTOP)
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    assert f"ronde: rank 0 (pid {pid}) is stopped by a signal" in line
    os.kill(pid, signal.SIGCONT)
    assert process.stderr.readline().decode() == f"ronde: rank 0 (pid {pid}) continues\n"
    (launcher.folder / "done").touch()
    code, _, err = end(process)
    assert (code, err) == (0, "")


def test_a_frozen_worker_that_has_to_end_is_let_go_on(launcher: Launcher) -> None:
    """A stopped worker would receive no signal but SIGKILL, for which all would have to wait."""
    launcher.script(ATTEMPT + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)")
    process = launcher.start("-n", "1", "--shutdown-timeout", str(HANGING_S), "script.py")
    ((pid, _),) = Job(process).await_workers(1).values()
    os.kill(pid, signal.SIGSTOP)
    process.terminate()
    code, _, err = end(process)
    assert code == 143
    assert "SIGKILL" not in err


@pytest.mark.slow
def test_a_launcher_that_was_stopped_is_named(launcher: Launcher) -> None:
    """After Ctrl-Z the agents miss its heartbeats, and say so when they end."""
    launcher.script(ATTEMPT + "time.sleep(600)")
    process = launcher.start("-H", "localhost:1", "--rdzv-conf", "keep_alive_interval=1", "script.py")
    ((worker, _),) = Job(process).await_workers(1).values()
    process.send_signal(signal.SIGSTOP)
    while os.path.exists(f"/proc/{worker}"):
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    code, _, err = end(process)
    assert code == 1
    assert "no heartbeat from the launcher for 3 s" in err.splitlines()[-1]
