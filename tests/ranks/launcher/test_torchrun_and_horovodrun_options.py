"""`ronde run` with command lines for torchrun and horovodrun."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tty

import pytest
from tests.ranks.launcher.test_launcher import HANGING_S, Launcher, await_lines, end

HAS_TORCH = importlib.util.find_spec("torch") is not None


SAVES = """
def save(signum, frame):
    print("saved after", signum, flush=True)
    sys.exit(0)
for signum in (signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(signum, save)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGQUIT, signal.SIGUSR1])
def test_a_scheduler_may_announce_the_end_by_other_signals(launcher: Launcher, signum: int) -> None:
    launcher.script(SAVES)
    process = launcher.start("-n", "2", "--signals-to-handle", "SIGUSR1", "script.py")
    await_lines(process, 2)
    process.send_signal(signum)
    code, out, err = end(process)
    assert (code, sorted(out.splitlines())) == (
        128 + signum,
        [f"[{rank}] saved after {signum}" for rank in (0, 1)],
    )
    assert f"\nronde: ended by {signal.Signals(signum).name}\n" in err


SAVES_SLOWLY = """
signal.signal(signal.SIGTERM, lambda *_: open("told", "w").close())
print("ready", flush=True)
while not os.path.exists("told") or not os.path.exists("let it save"): time.sleep(0.02)
print("saved")
"""


@pytest.mark.parametrize("hosts", ["", "-H localhost:1"])
def test_repeated_signals_of_a_scheduler_shorten_no_farewell(launcher: Launcher, hosts: str) -> None:
    launcher.script(SAVES_SLOWLY)
    process = launcher.start("-n", "1", *hosts.split(), "script.py")
    await_lines(process, 1)
    assert process.stderr is not None
    for _ in range(4):
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == b"ronde: ended by SIGTERM: SIGTERM to rank 0\n"
    (launcher.folder / "let it save").touch()
    code, out, _ = end(process)
    assert (code, out.partition("] ")[2]) == (143, "saved\n")


RAISES = {
    "ours": "import ronde\n@ronde.record\ndef main(): raise ValueError('the cause')\nif rank: main()",
    "torchs": "from torch.distributed.elastic.multiprocessing.errors import record\n"
    "@record\ndef main(): raise ValueError('the cause')\nif rank: main()",
    "none": "if rank: sys.exit(7)",
}


@pytest.mark.parametrize("how", ["ours", pytest.param("torchs", marks=pytest.mark.slow), "none"])
def test_the_launchers_error_file_has_the_cause(launcher: Launcher, how: str) -> None:
    """A scheduler names an error file for the launcher, too, and reads it when the job has failed."""
    if how == "torchs" and not HAS_TORCH:
        pytest.skip("needs PyTorch")
    launcher.script(RAISES[how] + "\n")
    path = launcher.folder / "reply.json"
    process = launcher.start("-n", "2", "script.py", env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)})
    code = end(process)[0]
    message = json.loads(path.read_text())["message"]
    assert message["errorCode"] == code
    if how == "none":
        assert re.match(r"rank 1 \(pid \d+\) failed with exit code 7 after \d", message["message"])
    else:
        assert message["message"] == "ValueError: the cause"
        assert message["extraInfo"]["py_callstack"].endswith("ValueError: the cause\n")
    path.unlink()
    launcher.script("print('fine')")
    assert end(launcher.start("script.py", env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}))[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("message", ["bad cell in row 7", {"message": "bad cell in row 7"}])
def test_a_cause_without_a_traceback_is_shown_too(launcher: Launcher, message: object) -> None:
    """A program that is not Python, or does not use `record`, may write only a message."""
    content = json.dumps({"message": message, "timestamp": "10"})
    launcher.script(
        f"print('reading', file=sys.stderr)\n"
        f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({content!r})\nsys.exit(3)"
    )
    code, _, err = launcher.run("script.py")
    assert code == 3
    assert err.endswith("\nronde: the last output of rank 0 was:\n    reading\n    bad cell in row 7\n")


@pytest.mark.parametrize("how", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_the_first_worker_reads_what_we_are_given(launcher: Launcher, how: str) -> None:
    launcher.script("print(repr(sys.stdin.readline()), flush=True); print(repr(sys.stdin.read()))")
    process = launcher.start("-n", "2", "--start-method", how, "--preload", "json", "script.py")
    out, err = process.communicate(b"one\ntwo", timeout=HANGING_S)
    assert err == b""
    assert sorted(out.decode().splitlines()) == ["[0] 'one\\n'", "[0] 'two'", "[1] ''", "[1] ''"]


def test_a_prompt_is_seen_before_it_is_answered(launcher: Launcher) -> None:
    """A prompt of input() or the debugger has no newline before the answer."""
    launcher.script("if rank == 0: print('hello', input('name? '))")
    controller, terminal = pty.openpty()
    tty.setraw(terminal)  # no echo, and newlines as they are
    process = launcher.start("-n", "2", "script.py", stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while shown != b"[0] name? ":
        assert select.select([controller], [], [], HANGING_S)[0], shown
        shown += os.read(controller, 4096)
    os.write(controller, b"Ada\n")
    assert process.wait(HANGING_S) == 0
    assert os.read(controller, 4096) == b"hello Ada\n"
    os.close(controller)


def test_a_job_in_the_background_leaves_the_keyboard_to_the_shell(launcher: Launcher) -> None:
    launcher.script("print(repr(sys.stdin.readline()))")
    controller, terminal = pty.openpty()
    # A shell with job control has the terminal, and each job a group of its own.
    shell = (
        "import fcntl, subprocess, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "subprocess.run(sys.argv[1:], process_group=0)"
    )
    job = [sys.executable, "-m", "ronde", "run", "script.py"]
    process = subprocess.Popen(
        [sys.executable, "-c", shell, *job],
        cwd=launcher.folder,
        start_new_session=True,
        stdin=terminal,
        stdout=subprocess.PIPE,
    )
    os.write(controller, b"for the shell\n")
    assert process.communicate(timeout=HANGING_S)[0] == b"[0] ''\n"
    assert os.read(terminal, 99) == b"for the shell\n"
    os.close(controller)
    os.close(terminal)


# A worker that is left alone waits until the agents that failed have told their launcher.
FAILS = """
import pathlib
host = os.environ["HOROVOD_HOSTNAME"]
if host in ("localhost", "::1"):
    if not os.path.exists(f"agent of {host}"):
        pathlib.Path(f"agent of {host}").write_text(str(os.getppid()))
    raise ValueError("of " + host)
if os.environ["WORLD_SIZE"] != "1":
    time.sleep(600)
while any(os.path.exists("/proc/" + agent.read_text()) for agent in pathlib.Path().glob("agent of *")):
    time.sleep(0.02)
print("alone on", host, flush=True)
"""


@pytest.mark.slow
def test_a_failing_worker_costs_an_elastic_job_its_host(launcher: Launcher) -> None:
    """As with horovodrun: the host is set aside, and the others go on."""
    launcher.script(FAILS)
    code, out, err = launcher.run("-np", "1", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "script.py")
    assert (code, out.splitlines()[-1].partition("] ")[2]) == (0, "alone on 127.0.0.1")
    assert re.search(r"\nronde: host localhost: rank 0 \(pid \d+\) failed with exit code 1 after", err)


@pytest.mark.slow
def test_hosts_that_fail_at_once_are_set_aside_one_after_the_other(launcher: Launcher) -> None:
    """The second host's failure may be a consequence; a repeated one is not."""
    launcher.script(FAILS)
    hosts = "localhost:1,[::1]:1,127.0.0.1:1"
    code, out, err = launcher.run("-np", "3", "--min-np", "1", "-H", hosts, "script.py")
    assert (code, out.splitlines()[-1].partition("] ")[2]) == (0, "alone on 127.0.0.1")
    for host in ("localhost", "::1"):
        assert re.search(rf"^ronde: host {host}: rank \d \(pid \d+\) failed with exit code 1", err, re.M)


@pytest.mark.slow
def test_an_elastic_job_whose_workers_fail_everywhere_ends_with_the_cause(launcher: Launcher) -> None:
    launcher.script("time.sleep(rank / 2)\nraise ValueError('everywhere')")
    code, _, err = launcher.run("-np", "1", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "script.py")
    assert code == 1
    assert err.endswith("    ValueError: everywhere\n")


def test_a_discovery_script_that_never_answers_is_not_waited_for(launcher: Launcher) -> None:
    """test_bad_launches has a script that fails."""
    path = launcher.folder / "hosts.sh"
    path.write_text("#!/bin/sh\nsleep 600\n")
    path.chmod(0o755)
    launcher.script("")
    options = ("-np", "1", "--host-discovery-script", "./hosts.sh", "--elastic-timeout", "1")
    code, _, err = launcher.run(*options, "script.py")
    assert code == 2
    assert err.endswith(
        f"there have been fewer than 1 slots for 1 s: 0 on the hosts that work (none); {path} has not answered\n"
    )
