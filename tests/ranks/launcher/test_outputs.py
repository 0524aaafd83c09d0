"""The output of real workers on the screen and in the files of the log directory."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.launch.agent.agent import run_agent
from ronde.launch.agent.living_worker import LivingWorker
from ronde.launch.agent.outputs import RunOutputs, WorkerOutput, fill_prefix
from ronde.launch.agent.worker_group import Absent, GroupEnd, Policy
from ronde.launch.agent.worker_group_shell import GroupListener, WorkerGroupShell
from ronde.launch.config import LaunchConfig, Outputs, Std, WorkerSpec
from ronde.launch.launch_plan import LaunchPlan, WorkerPlan
from ronde.launch.loop import Loop
from ronde.launch.screen import Screen, Sink
from ronde.process.disk import Disk, LogWriter
from ronde.process.process_groups import Process
from ronde.process.uncaught import Announcements
from ronde.settings import environment

HANGING_S = 100
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Shown:
    """The lines on the screen, unordered, and the files by path below the log directory."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capfd = capfd
        self.logs = folder / "logs"

    def run(self, text: str, outputs: Outputs, workers: int = 2, *arguments: str) -> int:
        script = self.folder / "script.py"
        script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
        code = run_here((sys.executable, str(script), *arguments), workers, outputs)
        self.out, self.err = self.capfd.readouterr()
        return code

    def files(self) -> dict[str, str]:
        return written_in(self.logs)


def run_here(argv: tuple[str, ...], workers: int, outputs: Outputs) -> int:
    return run_agent(LaunchConfig(WorkerSpec(argv, workers), outputs=outputs), environment()).exit_code


def written_in(logs: Path) -> dict[str, str]:
    """Return the text of every file, by its path below the only run's directory."""
    (run,) = logs.iterdir()
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()}


@pytest.fixture
def shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shown:
    return Shown(tmp_path, capfd)


TALK = "print('out', rank); print('err', rank, file=sys.stderr)"


def test_redirected_output_is_only_in_files(shown: Shown) -> None:
    assert shown.run(TALK, Outputs(log_dir=str(shown.logs), redirects={0: Std.ALL, 1: Std.OUT})) == 0
    assert (shown.out, shown.err) == ("", "[1] err 1\n")
    assert shown.files() == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
    }


def test_chosen_lines_of_all_workers_are_in_one_file(shown: Shown) -> None:
    talk = "print('loss', rank); print('other'); print('an error', file=sys.stderr); print('lossless')"
    outputs = Outputs(str(shown.logs), duplicates={Std.OUT: ("loss ", "no"), Std.ERR: ("ERR",)})
    assert shown.run(talk, outputs) == 0
    assert len(shown.out.splitlines()) == 6
    files = shown.files()
    assert sorted(files["attempt_0/filtered_stdout.log"].splitlines()) == ["[0] loss 0", "[1] loss 1"]
    assert files["attempt_0/filtered_stderr.log"] == ""


def test_text_that_is_no_utf8_hides_nothing(shown: Shown) -> None:
    """File names, and the messages with them, may be invalid UTF-8."""
    name = os.fsdecode(b"\xff")
    outputs = Outputs(str(shown.logs), prefix=f"{name} ", duplicates={Std.OUT: (name,)})
    fails = f"import ronde\n@ronde.record\ndef fail(): raise ValueError('no file ' + {name!r})\nfail()"
    assert shown.run("sys.stdout.buffer.write(b'a\\xff')\n" + fails, outputs, 1) == 1
    assert shown.out == "\ufffd a\ufffd\n"
    assert shown.err.endswith("\n    ValueError: no file \\udcff\n")
    (collected,) = shown.logs.rglob("filtered_stdout.log")
    assert collected.read_bytes() == b"\xff a\xff\n"


def test_output_by_rank_lies_where_horovodrun_puts_it(shown: Shown) -> None:
    outputs = Outputs(str(shown.logs), tee={-1: Std.ALL}, by_rank=True, duplicates={Std.OUT: ("out 1",)})
    for _ in range(2):  # the second time over the files of the first
        assert shown.run(TALK, outputs, workers=11) == 0
    assert (len(shown.out.splitlines()), len(shown.err.splitlines())) == (11, 11)
    written = {str(path.relative_to(shown.logs)): path.read_text() for path in shown.logs.rglob("std*")}
    assert len(written) == 22
    assert (written["rank.03/stdout"], written["rank.10/stderr"]) == ("out 3\n", "err 10\n")
    collected = (shown.logs / "rank.00" / "filtered_stdout.log").read_text()
    assert sorted(collected.splitlines()) == ["[10] out 10", "[1] out 1"]


def test_redirected_output_does_not_pass_through_the_launcher(shown: Shown) -> None:
    assert shown.run("print(os.readlink('/proc/self/fd/1'))", Outputs(str(shown.logs), {-1: Std.OUT})) == 0
    (run,) = shown.logs.iterdir()
    assert shown.files()["attempt_0/1/stdout.log"] == f"{run}/attempt_0/1/stdout.log\n"


def test_a_tee_keeps_the_bytes_and_shows_the_lines(shown: Shown) -> None:
    text = r"os.write(1, b'1%\r2%\r\nwithout end'); os.write(2, b'\xff')"
    assert shown.run(text, Outputs(log_dir=str(shown.logs), tee={0: Std.OUT, -1: Std.ERR}), 1) == 0
    assert shown.out == "[0] 1%\r[0] 2%\r\n[0] without end\n"
    assert shown.run(text, Outputs(log_dir=str(shown.logs), tee={1: Std.OUT, -1: Std.ERR}), 1) == 0
    written = {path.name: path.read_bytes() for path in shown.logs.rglob("*.log")}
    assert written == {"stdout.log": b"1%\r2%\r\nwithout end", "stderr.log": b"\xff"}


def test_only_the_chosen_local_ranks_are_shown(shown: Shown) -> None:
    outputs = Outputs(str(shown.logs), tee={0: Std.OUT}, filter=frozenset({1}))
    assert shown.run(TALK, outputs) == 0
    assert (shown.out, shown.err) == ("[1] out 1\n", "[1] err 1\n")
    assert shown.files() == {"attempt_0/0/stdout.log": "out 0\n"}


@pytest.mark.parametrize("how", ["redirected", "filtered"])
def test_the_traceback_of_a_failure_is_shown_wherever_it_went(shown: Shown, how: str) -> None:
    outputs = (
        Outputs(str(shown.logs), redirects={-1: Std.ALL})
        if how == "redirected"
        else Outputs(filter=frozenset({0}))
    )
    assert shown.run("if rank == 1: raise ValueError('the cause')", outputs) == 1
    assert shown.err.endswith("    ValueError: the cause\n")
    assert shown.err.count("the cause") == 2  # the line of the source, and the exception


def test_lines_may_have_another_prefix(shown: Shown) -> None:
    outputs = Outputs(prefix="{role}/${rank}.{local_rank}@{host}|")
    assert shown.run("print('x')", outputs, 1) == 0
    assert shown.out == f"default/0.0@{socket.gethostname()}|x\n"
    assert shown.run("print('x')", Outputs(timestamps=True), 1) == 0
    assert shown.out.endswith(" [0] x\n")
    assert len(shown.out) == len("2026-01-01 00:00:00 [0] x\n")


def test_with_several_nodes_lines_name_the_host(tmp_path: Path) -> None:
    outputs = RunOutputs(Outputs(log_dir=str(tmp_path)), "run", print, host="here", several=True)
    reader, writer = os.pipe()
    sink = Sink(writer)
    process = Process(["/bin/echo", "hello"], {})
    for stream in outputs.worker(0, WorkerPlan(5, 1, 1, (), {})).streams(process, sink, sink):
        os.set_blocking(stream.fileno(), True)
        while stream.pump():
            pass
        stream.close()
    process.reap()
    assert os.read(reader, 99) == b"[here:5] hello\n"
    outputs.close()
    sink.close()
    os.close(reader)
    os.close(writer)


def test_a_prefix_with_an_unknown_name_is_refused() -> None:
    assert fill_prefix("[${role_name}${rank}]: {", 3, 1, "a", "trainer") == "[trainer3]: {"
    with pytest.raises(
        UsageError, match=r"contains \{world\}, but only \{rank\}, \{local_rank\}, .* have a meaning"
    ):
        fill_prefix("[{world}]", 0, 0, "a", "b")


def test_only_the_macro_is_replaced_in_arguments(shown: Shown) -> None:
    assert shown.run("print(*sys.argv[1:])", Outputs(), 2, "cuda:${local_rank}", "$$", "$local_rank") == 0
    assert sorted(shown.out.splitlines()) == ["[0] cuda:0 $$ $local_rank", "[1] cuda:1 $$ $local_rank"]


# Error files.

RECORD = """
import ronde
@ronde.record
def main():
    if rank == 1:
        raise ValueError("the cause")
main()
"""


def test_an_exception_is_recorded(shown: Shown) -> None:
    assert shown.run(RECORD, Outputs(str(shown.logs), redirects={-1: Std.ALL})) == 1
    message = json.loads(shown.files()["attempt_0/1/error.json"])["message"]
    assert message["message"] == "ValueError: the cause"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):\n")
    assert shown.err.endswith("    ValueError: the cause\n")
    assert "attempt_0/0/error.json" not in shown.files()


def test_without_a_log_directory_nothing_is_left(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = shown.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)  # is to be found out anew
    assert shown.run(RECORD + "print(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))", Outputs()) == 1
    assert str(temporary) in shown.out
    assert list(temporary.iterdir()) == []


def test_the_exception_survives_an_error_file_that_cannot_be_written(shown: Shown) -> None:
    break_it = "os.environ['TORCHELASTIC_ERROR_FILE'] = '/nowhere/error.json'\n"
    assert shown.run(break_it + RECORD, Outputs()) == 1
    assert (
        "[1] ronde: cannot write the error file /nowhere/error.json: No such file or directory\n" in shown.err
    )
    assert shown.err.endswith("    ValueError: the cause\n")


# What goes wrong with the directory.


def test_a_log_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"cannot write logs to .*/file/logs: Not a directory; --log-dir must"
    ):
        RunOutputs(Outputs(log_dir=str(tmp_path / "file" / "logs")), "run", print, host="here")


@pytest.mark.root
def test_a_full_disk_costs_output_but_no_job(shown: Shown) -> None:
    """A tee stops with a message when the disk is full; the job goes on, and the screen shows everything."""
    shown.logs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(shown.logs)], check=True)
    try:
        text = "for _ in range(2000): print('x' * 99)"
        assert shown.run(text, Outputs(str(shown.logs), tee={0: Std.OUT}), 1) == 0
        assert shown.out == ("[0] " + "x" * 99 + "\n") * 2000
        assert shown.err.count("No space left on device; rank 0 goes on") == 1
        # A redirect is written by the worker itself, who fails; the report says why.
        assert shown.run(text, Outputs(str(shown.logs), redirects={-1: Std.ALL}), 1) != 0
        assert "is full: output may be missing)" in shown.err
    finally:
        subprocess.run(["umount", str(shown.logs)], check=True)


class _Listener(GroupListener):
    """Keeps the rank of the cause, and the end. No worker joins others or continues."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def note_cause(self, rank: int) -> None:
        self.said.append(rank)

    def note_continuing(self, count: int) -> None: ...

    def note_completed(self, training: int) -> None: ...

    def note_settled(self) -> None: ...

    def note_world_left(self) -> None: ...

    def note_awaited_exit(self, is_awaited: bool) -> None: ...

    def note_absent(self, absent: Absent | None) -> None: ...

    def note_end(self, end: GroupEnd) -> None:
        self.said.append(end)


def test_a_disk_that_hangs_holds_up_no_supervision(tmp_path: Path) -> None:
    """A named pipe without a reader stands for it. Rank 0 writes much; then rank 1 fails, and that ends both."""
    (tmp_path / "0").mkdir()
    disk = tmp_path / "0" / "stdout.log"
    os.mkfifo(disk)
    text = (
        "import pathlib, sys, time\nwritten = pathlib.Path(sys.argv[2])\nif int(sys.argv[1]):\n"
        "    while not written.exists(): time.sleep(0.01)\n    sys.exit(5)\n"
        "print('x' * 99, flush=True)\nwritten.touch()\nwhile True: print('x' * 99)"
    )
    logs, loop, problems = LogWriter(), Loop(), list[str]()
    screen = Screen(loop, lambda: None)
    listener = _Listener()
    said = listener.said

    def start(worker: WorkerPlan) -> LivingWorker:
        teed = Outputs(tee={0: Std.OUT}, filter=frozenset())
        prefixes = {Std.OUT: b"", Std.ERR: b""}
        output = WorkerOutput(
            teed,
            str(tmp_path / "0"),
            "",
            worker.rank,
            worker.rank,
            lambda *_: prefixes,
            problems.append,
            logs,
            Disk(),
        )
        return LivingWorker(Process(worker.argv, environment()), output, None, time.monotonic_ns())

    workers = tuple(
        WorkerPlan(rank, rank, rank, (sys.executable, "-c", text, str(rank), str(tmp_path / "written")), {})
        for rank in range(2)
    )
    policy = Policy(grace_ns=10**8)
    announcements = Announcements()
    group = WorkerGroupShell(LaunchPlan(workers), 0, policy, loop, screen, announcements, 10**9, listener)
    for worker in workers:
        group.add_worker(worker.rank, start(worker))
    while len(said) < 2:
        group.balance()
        loop.turn()
    group.close()
    announcements.close()
    assert said[0] == 1
    assert logs.waiting
    assert b"x" * 99 in disk.read_bytes()  # it is back
    while logs.waiting:
        select.select([logs], [], [], HANGING_S)
        logs.settle()
    logs.close()
    screen.close()
    loop.close()
    assert problems == []


# The same as torchrun.

SAME = """
import os, sys, time
rank = int(os.environ["RANK"])
print("out", rank, sys.argv[1:])
print("err", rank, file=sys.stderr)
names = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"
path = os.environ["TORCHELASTIC_ERROR_FILE"].split(os.sep)
print(path[-1], path[-2], path[-3], path[-4].startswith(os.environ["TORCHELASTIC_RUN_ID"] + "_"))
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if rank == 1:
        raise ValueError("the cause")
    time.sleep(1)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_files_are_those_of_torchrun(tmp_path: Path) -> None:
    """The same script with the same flags under both: the same files with the same contents."""
    (tmp_path / "script.py").write_text(SAME)
    flags = ["--nproc-per-node", "2", "--redirects", "0:1", "--tee", "1:3"]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    command = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(theirs), *flags]
    done = subprocess.run(
        [*command, "script.py", "x=${local_rank}"],
        cwd=tmp_path,
        capture_output=True,
        timeout=HANGING_S,
        check=False,
    )
    assert done.returncode == 1
    outputs = Outputs(str(ours), redirects={0: Std.OUT}, tee={1: Std.ALL})
    assert run_here((sys.executable, str(tmp_path / "script.py"), "x=${local_rank}"), 2, outputs) == 1
    expected, got = (normal(written_in(each), tmp_path) for each in (theirs, ours))
    assert set(expected) == {"attempt_0/0/stdout.log"} | {
        f"attempt_0/1/{name}" for name in ("stdout.log", "stderr.log", "error.json")
    }
    assert got == expected


def normal(files: dict[str, str], folder: Path) -> dict[str, object]:
    """Return the contents without the times and names that differ from run to run."""
    result: dict[str, object] = dict(files)
    for path, text in files.items():
        text = text.replace(f'"{folder}{os.sep}', '"').replace(f'\\"{folder}{os.sep}', '\\"')
        if path.endswith(".json"):
            content = json.loads(text)
            assert int(content["message"]["extraInfo"].pop("timestamp")) > 0
            result[path] = content
        else:
            result[path] = text
    return result
