"""`ronde run` as the entry point and first process of a container, which has to reap orphans."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys

import pytest
from tests.ranks.launcher.test_launcher import Launcher, end

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare"),
]

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
COMMAND = [*CONTAINER, sys.executable, "-m", "ronde", "run", "-n", "2", "script.py"]


def start(launcher: Launcher) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        COMMAND, cwd=launcher.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    launcher.started.append(process)
    return process


def test_orphans_do_not_stay_as_zombies_and_the_workers_end_is_known(launcher: Launcher) -> None:
    launcher.script("""
        import subprocess
        start = "setsid sleep 0.1 > /dev/null & echo $!"
        orphan = subprocess.run(["sh", "-c", start], stdout=subprocess.PIPE, text=True).stdout.strip()
        while os.path.exists(f"/proc/{orphan}"):
            time.sleep(0.02)
        sys.exit(7 * rank)
    """)
    code, out, err = end(start(launcher))
    assert (code, out) == (7, "")
    assert "rank 1 (pid " in err
    assert "failed with exit code 7" in err


def test_signals_to_the_container_reach_the_workers(launcher: Launcher) -> None:
    launcher.script("""
        def save(*_):
            print("saved", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        if rank == 0:
            while not os.path.exists("ready"): time.sleep(0.02)
            os.kill(1, signal.SIGTERM)
        else:
            open("ready", "w").close()
        time.sleep(600)
    """)
    code, out, err = end(start(launcher))
    assert code == 143
    assert sorted(out.splitlines()) == ["[0] ready", "[0] saved", "[1] ready", "[1] saved"]
    assert "ended by SIGTERM" in err


def test_ctrl_c_counts_once(launcher: Launcher) -> None:
    """A terminal signals the whole process group; a second Ctrl-C would kill the workers."""
    launcher.script("""
        def save(*_):
            time.sleep(0.5)
            print("saved", flush=True)
            sys.exit()
        signal.signal(signal.SIGINT, save)
        print("ready", flush=True)
        time.sleep(600)
    """)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launcher.folder)
        os.execvp(COMMAND[0], COMMAND)
    shown = b""
    try:
        while shown.count(b"ready") < 2:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        while data := os.read(terminal, 4096):
            shown += data
    except OSError:  # its other end is closed
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, shown
    assert shown.count(b"saved") == 2, shown
    assert b"again" not in shown
