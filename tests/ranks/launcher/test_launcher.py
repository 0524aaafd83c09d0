"""`ronde run` with real processes: its output and its end.

The fixture in tests/conftest.py checks that no process is left.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

HANGING_S = 60  # when a test is given up; nothing here takes that long

# What a script needs to say "I am here" and to wait for the test.
WAIT = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
SLEEP = "print('ready', flush=True); time.sleep(600)\n"


class Launcher:
    """A `ronde run` in the folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def script(self, text: str, name: str = "script.py") -> None:
        (self.folder / name).write_text(WAIT + textwrap.dedent(text))

    def start(self, *words: str, **options: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-m", "ronde", "run", *words], cwd=self.folder, **(pipes | options)
        )
        self.started.append(process)
        return process  # type: ignore[no-any-return]

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        return end(self.start(*words))

    def run_script(self, workers: int, text: str) -> tuple[int, str, str]:
        self.script(text)
        return self.run("-n", str(workers), "script.py")


def end(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANGING_S)
    return process.returncode, out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape")


def await_lines(process: subprocess.Popen[bytes], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().decode() for _ in range(count))


# What workers are and what they see.


def test_every_worker_knows_its_rank(launcher: Launcher) -> None:
    code, out, err = launcher.run_script(
        3, "print(rank, os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], sys.stdin.read() == '')"
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} {rank} 3 True" for rank in range(3)]


def test_arguments_reach_the_script_untouched(launcher: Launcher) -> None:
    launcher.script("print(sys.argv)")
    for words in (["--", "script.py"], ["script.py"]):
        code, out, _ = launcher.run("-n", "1", *words, "-n", "--", "--help", "a b", "")
        assert (code, out) == (0, "[0] ['script.py', '-n', '--', '--help', 'a b', '']\n")


def test_a_module_runs_as_the_main_program(launcher: Launcher) -> None:
    launcher.script("print(__name__, sys.argv[1:])", "trainer.py")
    assert launcher.run("-n", "1", "-m", "trainer", "--x") == (0, "[0] __main__ ['--x']\n", "")


def test_any_program(launcher: Launcher) -> None:
    assert launcher.run("-n", "2", "sh", "-c", "exit 0") == (0, "", "")
    program = launcher.folder / "program.py"
    program.write_text("#!/bin/sh\necho shell $0 $1\n")
    program.chmod(0o755)
    assert launcher.run("--no-python", "program.py", "x") == (0, "[0] shell ./program.py x\n", "")


def test_a_program_that_cannot_be_started(launcher: Launcher) -> None:
    program = launcher.folder / "program"
    program.write_bytes(b"\x7fELF of another machine\0")
    program.chmod(0o755)
    code, out, err = launcher.run("-n", "2", "program")
    assert (code, out) == (126, "")
    assert "    cannot start ./program: Exec format error\n" in err


def test_signals_are_as_in_a_shell(launcher: Launcher) -> None:
    """Python ignores SIGPIPE; a program that the launcher starts must not."""
    code, out, err = launcher.run("sh", "-c", "yes | head -n 1; trap - INT; kill -INT $$")
    assert (code, out) == (130, "[0] y\n")
    assert "killed by SIGINT" in err


def test_workers_reach_the_store(launcher: Launcher) -> None:
    code, out, err = launcher.run_script(
        2,
        """
        from ronde.stores.tcp import StoreClient
        from ronde.settings import JobKey
        store = StoreClient(os.environ["RONDE_STORE"], JobKey.from_hex(os.environ["RONDE_JOB_KEY"]), 10**10)
        store.set(f"rank{rank}", b"here")
        print(store.get(f"rank{1 - rank}", 10**10).decode())
        store.close()
        """,
    )
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] here", "[1] here"], "")


def test_dry_run_starts_nothing_and_hides_the_key(launcher: Launcher) -> None:
    launcher.script("open('started', 'w')")
    code, out, err = launcher.run("--dry-run", "-n", "2", "script.py", "x")
    assert (code, err) == (0, "")
    assert "RONDE_JOB_KEY=<hidden>" in out
    own = "".join(
        f"    {name}=1\n"
        for name in ("HOROVOD_LOCAL_RANK", "HOROVOD_RANK", "LOCAL_RANK", "RANK", "ROLE_RANK")
    )
    assert out.endswith(f"rank 1:\n{own}    {sys.executable} script.py x\n")
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize("hosts", [(), ("-H", "a:1,b:1")])
def test_dry_run_hides_what_the_user_passes_on(
    launcher: Launcher, hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "my-secret")
    launcher.script("pass")
    code, out, _ = launcher.run("--dry-run", "-x", "TOKEN", *hosts, "script.py")
    assert code == 0
    assert "TOKEN=<hidden>" in out
    assert "my-secret" not in out


# Output.


def test_streams_are_kept_apart(launcher: Launcher) -> None:
    code, out, err = launcher.run_script(
        1, "print('out'); print('err', file=sys.stderr); print('end', end='')"
    )
    assert (code, out, err) == (0, "[0] out\n[0] end\n", "[0] err\n")


def test_lines_are_never_mixed(launcher: Launcher) -> None:
    code, out, _ = launcher.run_script(
        4,
        """
        for _ in range(300):
            for part in ("a" * 50, "b" * 5000, "c\\n"):
                os.write(1, part.encode())
        """,
    )
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 1200
    assert {line[4:] for line in lines} == {"a" * 50 + "b" * 5000 + "c"}


def test_binary_output_and_endless_lines(launcher: Launcher) -> None:
    code, out, _ = launcher.run_script(
        1, r"os.write(1, b'\xff\xfe\x00\n'); sys.stdout.write('x' * 3_000_000)"
    )
    assert code == 0
    assert out == "[0] \udcff\udcfe\0\n[0] " + "x" * 3_000_000 + "\n"


def test_updates_in_a_log(launcher: Launcher) -> None:
    code, out, _ = launcher.run_script(1, r"print('\r1%', end=''); print('\r2%', end=''); print('\r3%')")
    assert (code, out) == (0, "[0] 1%\r[0] 2%\r[0] 3%\n")


def test_a_bar_on_a_terminal(launcher: Launcher) -> None:
    launcher.script(
        r"""
        sys.stderr.write(os.environ["COLUMNS"] + " columns\n\r1%")
        time.sleep(0.1)
        sys.stderr.write("\r2%\n")
        """
    )
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = launcher.start("script.py", stdout=terminal, stderr=terminal, env=variables)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(controller, 4096):
            shown += chunk
    except OSError:  # how Linux says that nobody has the terminal open any more
        pass
    os.close(controller)
    process.communicate(timeout=HANGING_S)
    assert process.returncode == 0
    assert shown == b"[0] 76 columns\r\n\r[0] 1%\x1b[K\r\x1b[K[0] 2%\r\n"


def test_memory_does_not_grow_with_unread_output(launcher: Launcher) -> None:
    launcher.script("os.write(1, b'go\\n'); [os.write(1, b'y' * 99 + b'\\n') for _ in range(10**6)]")
    process = launcher.start("-n", "2", "script.py")
    await_lines(process, 2)
    before, deadline = -1, time.monotonic() + HANGING_S
    while (after := read_so_far(process.pid)) != before:  # until it has stopped reading
        assert time.monotonic() < deadline
        before = after
        time.sleep(0.3)
    assert after < 8 << 20  # of 200 MB; some 4 MB are modules
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


def read_so_far(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["", "-H localhost:2"])
def test_without_a_reader_the_job_ends(launcher: Launcher, hosts: str) -> None:
    """Soon, because workers get no time to save their state."""
    launcher.script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: print(rank); time.sleep(0.01)
    """)
    process = launcher.start("-n", "2", *hosts.split(), "script.py")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read().decode()
    assert "\nronde: the output cannot be written any more" in f"\n{err}"
    assert "\nronde: still running 5 s later: SIGKILL to rank" in err
    assert process.wait(HANGING_S) == 141


def test_closed_standard_streams(launcher: Launcher) -> None:
    launcher.script("print('nowhere'); sys.exit(5)")
    command = f"exec {sys.executable} -m ronde run script.py <&- >&- 2>&-"
    assert (
        subprocess.run(["sh", "-c", command], cwd=launcher.folder, timeout=HANGING_S, check=False).returncode
        == 5
    )


# Failures.


def test_the_first_failure_is_reported_last(launcher: Launcher) -> None:
    code, out, err = launcher.run_script(
        3,
        """
        if rank == 1:
            print("hello", file=sys.stderr)
            raise ValueError("the cause")
        time.sleep(0.5 + rank / 10)
        sys.exit(f"ronde.errors.PeerLostError: rank 1 has gone")
        """,
    )
    assert (code, out) == (1, "")
    streamed, report = err[: err.index("ronde: ")], err[err.index("ronde: ") :]
    assert streamed.count("[1] ValueError: the cause\n") == 1
    assert re.fullmatch(
        r"""ronde: rank 1 \(pid \d+\) failed with exit code 1 after \d\.\d s
ronde: ranks 0, 2 ended with exit code 1 because of that
ronde: the last output of rank 1 was:
    hello
    Traceback \(most recent call last\):
(    .*\n)+    ValueError: the cause
""",
        report,
    )


def test_a_worker_that_lost_a_peer_is_not_the_cause_even_if_first(launcher: Launcher) -> None:
    code, _, err = launcher.run_script(
        2,
        """
        if rank == 0:
            sys.exit("ronde.errors.PeerLostError: rank 1 has gone")
        time.sleep(0.5)
        sys.exit(7)
        """,
    )
    assert code == 7
    assert "ronde: rank 1 (pid " in err


def test_the_exit_code_is_that_of_the_first_failure(launcher: Launcher) -> None:
    code, _, err = launcher.run_script(2, "time.sleep(rank / 2); sys.exit(3 + rank)")
    assert code == 3
    assert "\nronde: rank 1 ended with exit code 4 after that\n" in "\n" + err


def test_survivors_are_ended_and_may_clean_up(launcher: Launcher) -> None:
    code, out, err = launcher.run_script(
        2,
        """
        if rank == 1:
            while not os.path.exists("ready"): time.sleep(0.02)
            sys.exit(9)
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            open("ready", "w").close()
            time.sleep(600)
        finally:
            print("cleaned up")
        """,
    )
    assert (code, out) == (9, "[0] cleaned up\n")
    assert "ronde: still running 3 s after rank 1 failed: SIGTERM to rank 0\n" in err
    assert "ronde: rank 0 was ended by the launcher\n" in err


def test_a_rank_that_ends_before_the_others_have_joined_has_failed(launcher: Launcher) -> None:
    code, _, err = launcher.run_script(
        2, "if rank == 1: sys.exit(0)\nimport ronde\nronde.init()\nprint('never')"
    )
    assert code == 1
    assert "ronde: rank 1 (pid" in err
    assert re.search(
        r"rank 1 \(pid \d+\), for which rank 0 waits, ended with exit code 0 after .* without calling ronde.init\(\)\n",
        err,
    )


def test_a_worker_may_close_all_descriptors(launcher: Launcher) -> None:
    """As a program does that becomes a daemon. Ronde's threads end, although nothing can wake them any more."""
    text = "import ronde\nronde.init()\nprint(ronde.size(), flush=True)\nos.closerange(3, 4096)"
    code, out, err = launcher.run_script(2, text)
    assert (code, sorted(out.splitlines()), err) == (0, ["[0] 2", "[1] 2"], "")


def test_a_worker_may_open_files_in_place_of_closed_descriptors(launcher: Launcher) -> None:
    """They have the numbers of Ronde's descriptors; Ronde writes nothing into them, and ends nevertheless."""
    code, _, err = launcher.run_script(
        2,
        """
        import ronde
        ronde.init()
        ronde.world().barrier()
        os.closerange(3, 4096)
        files = [open(f"{rank}.{number}", "wb", buffering=0) for number in range(30)]
        for each in files:
            each.write(b"x")
        """,
    )
    assert (code, err) == (0, "")
    written = [path.read_bytes() for path in launcher.folder.glob("[01].*")]
    assert written == [b"x"] * 60


@pytest.mark.slow
def test_stubborn_survivors_are_killed(launcher: Launcher) -> None:
    code, _, err = launcher.run_script(
        2,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            while not os.path.exists("ready"): time.sleep(0.02)
            sys.exit(9)
        open("ready", "w").close()
        time.sleep(600)
        """,
    )
    assert code == 9
    assert "ronde: still running 5 s later: SIGKILL to rank 0\n" in err


def test_a_killed_worker(launcher: Launcher) -> None:
    launcher.script("print(os.getpid(), flush=True)\ntime.sleep(600)")
    process = launcher.start("-n", "2", "script.py")
    victim = int(await_lines(process, 2)[1].split()[1])
    os.kill(victim, signal.SIGKILL)
    code, _, err = end(process)
    assert code == 137
    assert re.search(
        rf"ronde: rank 1 \(pid {victim}\) was killed by SIGKILL after [\d.]+ s \(out of memory\?\)", err
    )


# Interrupts.

FAMILY = """
import subprocess
child = subprocess.Popen(["sleep", "600"], stdout=sys.stdout)
"""


@pytest.mark.parametrize(
    ("signum", "code", "reason"),
    [
        (signal.SIGINT, 130, "interrupted by Ctrl-C"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_ends_everything(launcher: Launcher, signum: int, code: int, reason: str) -> None:
    launcher.script(FAMILY + SLEEP)
    process = launcher.start("-n", "2", "script.py")
    await_lines(process, 2)
    process.send_signal(signum)
    got, _, err = end(process)
    assert got == code
    assert f"ronde: {reason}: {signal.Signals(signum).name} to ranks 0, 1\n" in err
    assert f"ronde: {reason}\nronde: ranks 0, 1 were ended by the launcher\n" in err


def test_a_signal_that_kills_the_launcher_is_named(launcher: Launcher) -> None:
    launcher.script(FAMILY + SLEEP)
    process = launcher.start("-n", "2", "script.py")
    await_lines(process, 2)
    process.send_signal(signal.SIGUSR1)
    got, _, err = end(process)
    assert got == -signal.SIGUSR1
    assert "ronde: killed by SIGUSR1; --signals-to-handle SIGUSR1 passes it on to the workers" in err


def test_a_hang_up_may_be_ignored(launcher: Launcher) -> None:
    launcher.script("print('ready', flush=True); os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)")
    command = f"trap '' HUP; exec {sys.executable} -m ronde run script.py"
    assert (
        subprocess.run(["sh", "-c", command], cwd=launcher.folder, timeout=HANGING_S, check=False).returncode
        == 0
    )


def test_second_ctrl_c_kills(launcher: Launcher) -> None:
    launcher.script("signal.signal(signal.SIGINT, lambda *_: print('not yet'))\n" + SLEEP)
    process = launcher.start("-n", "1", "script.py")
    assert await_lines(process, 1) == ["[0] ready\n"]
    process.send_signal(signal.SIGINT)
    assert await_lines(process, 1) == ["[0] not yet\n"]
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130
    assert "ronde: Ctrl-C again: SIGKILL to rank 0\n" in err


def test_a_process_that_outlives_its_shell_may_clean_up(launcher: Launcher) -> None:
    """A shell dies of SIGTERM at once; its children get the signal, too, and the launcher waits for them."""
    launcher.script(
        """
        def stop(*_):
            time.sleep(0.5)
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        """
        + SLEEP
    )
    process = launcher.start("sh", "-c", f"{sys.executable} script.py; true")
    await_lines(process, 1)
    process.send_signal(signal.SIGTERM)
    code, out, _ = end(process)
    assert (code, out) == (143, "[0] saved\n")


def test_processes_left_behind_by_workers_are_ended(launcher: Launcher) -> None:
    launcher.script(FAMILY)
    code, _, err = launcher.run("-n", "1", "script.py")
    assert (code, err) == (0, "ronde: the workers have ended but left processes behind: SIGTERM to rank 0\n")


def test_a_daemon_may_stay_and_does_not_keep_us(launcher: Launcher) -> None:
    launcher.script(FAMILY.replace("stdout=sys.stdout", "start_new_session=True") + "print(child.pid)")
    code, out, _ = launcher.run("-n", "1", "script.py")
    assert code == 0
    os.kill(int(out.split()[1]), signal.SIGKILL)


def test_workers_die_with_a_killed_launcher(launcher: Launcher) -> None:
    launcher.script(SLEEP)
    process = launcher.start("-n", "3", "script.py")
    await_lines(process, 3)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL  # all pipes are at their end: the workers are gone too


def test_what_workers_have_started_dies_with_a_killed_launcher(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "sh", "-c", "sh -c 'echo ready; sleep 600; true'; true")
    await_lines(process, 2)
    process.kill()
    assert end(process)[0] == -signal.SIGKILL  # likewise


def test_a_worker_does_not_start_when_the_launcher_has_died() -> None:
    program = Path(__file__).parents[3] / "src/ronde/process/die_with_parent.py"
    dead = str(2**22 + 1)  # no process has such a number
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), dead, "any", "/bin/echo", "hello"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
