"""Python functions as workers, with real processes.

The fixture in tests/conftest.py checks that no process, open file or shared memory is left.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from tests.ranks.launcher import called_functions as functions

import ronde
from ronde.cli import main
from ronde.launch.callables import ElasticLaunch
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.net.host import host_name

HANGING_S = 100
needs_cloudpickle = pytest.mark.skipif(
    not importlib.util.find_spec("cloudpickle"), reason="needs cloudpickle"
)
WITHOUT_CLOUDPICKLE = "import sys; sys.modules['cloudpickle'] = None\n"


def python(*words: str, folder: Path, stdin: str = "") -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a new Python process."""
    done = subprocess.run(
        [sys.executable, *words],
        input=textwrap.dedent(stdin),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_results_come_by_rank() -> None:
    assert ronde.run(functions.place, ("a",), {"b": 2}, np=3) == [
        (rank, 3, ("a",), {"b": 2}) for rank in range(3)
    ]


def test_workers_are_ranks_of_a_world(capfd: pytest.CaptureFixture[str]) -> None:
    assert ronde.run(functions.together, (10.0,), np=2) == [21.0, 21.0]
    assert capfd.readouterr() == ("", "")


def test_what_workers_say_goes_where_print_goes(tmp_path: Path) -> None:
    """Notebooks and tests replace the standard streams."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        ronde.run(functions.speak, ("größer",))
        assert main(["run", "--no-python", "sh", "-c", "echo in a shell; exit 3"]) == 3
    assert out.getvalue() == "[0] größer\n[0] in a shell\n"
    assert re.fullmatch(
        r"\[0\] not größer\nronde: rank 0 \(pid \d+\) failed with exit code 3 .*\n", err.getvalue()
    )
    with (
        (tmp_path / "both").open("w+", encoding="ascii") as both,
        redirect_stdout(both),
        redirect_stderr(both),
    ):
        ronde.run(functions.speak, ("ß",))
        both.seek(0)
        assert sorted(both.read().splitlines()) == [r"[0] \xdf", r"[0] not \xdf"]


def test_what_the_caller_has_printed_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "f.py").write_text("def f(): print('worker')\n")
    script = "import f, ronde; print('before'); ronde.run(f.f); print('after')"
    assert python("-c", script, folder=tmp_path) == (0, "before\n[0] worker\nafter\n", "")


@pytest.mark.slow
def test_workers_from_a_fork_server() -> None:
    parents = ronde.run(functions.parent, np=3, start_method="forkserver")
    assert len(set(parents)) == 1
    assert "zygote.py" in parents[0]
    assert ronde.run(functions.together, (10.0,), np=2, start_method="forkserver") == [21.0, 21.0]


@pytest.mark.slow
def test_big_results() -> None:
    size_bytes = 100 << 20
    (result,) = ronde.run(functions.big, (size_bytes,))
    assert len(result) == size_bytes


def test_the_first_failure_is_raised_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ronde.WorkerError, match=r"rank 1 \(pid \d+\) failed: ValueError: the cause"
    ) as caught:
        ronde.run(functions.raises_on, (1,), np=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.host) == (1, 1, host_name())
    assert caught.value.last_lines[-1] == "ValueError: the cause"
    first, *_, last = caught.value.traceback_text.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: the cause")
    assert "in raises_on" in caught.value.traceback_text
    assert "callable_worker.py" not in caught.value.traceback_text
    assert str(caught.value).endswith(caught.value.traceback_text.rstrip())
    assert "ronde: rank 1 (pid" not in capfd.readouterr().err, "who catches the error may not care"


@pytest.mark.slow
def test_a_killed_worker_is_named() -> None:
    with pytest.raises(ronde.WorkerError, match=r"rank 0 \(pid \d+\) was killed by SIGKILL") as caught:
        ronde.run(functions.dies_on, (0,), np=2)
    assert (caught.value.rank, caught.value.exit_code) == (0, -signal.SIGKILL)
    assert (caught.value.exit_codes, caught.value.traceback_text) == ({0: -signal.SIGKILL}, "")


def test_all_that_failed_are_known_by_their_codes(tmp_path: Path) -> None:
    with pytest.raises(ronde.WorkerError) as caught:
        ronde.run(functions.exit_together, (str(tmp_path),), np=3)
    assert caught.value.exit_codes == {0: 10, 1: 11, 2: 12}
    assert pickle.loads(pickle.dumps(caught.value)).exit_codes == caught.value.exit_codes


def test_a_worker_that_exits_has_no_result() -> None:
    with pytest.raises(
        ronde.WorkerError, match="rank 0 ended without a result: the function must return, not exit"
    ):
        ronde.run(functions.leaves)


def test_results_that_cannot_be_sent_or_read() -> None:
    with pytest.raises(
        ronde.WorkerError, match="the result, of type generator, cannot be sent to the caller: "
    ):
        ronde.run(functions.cannot_be_sent)
    with pytest.raises(
        ronde.WorkerError, match="the result of rank 0 cannot be read here: ValueError: invalid literal"
    ):
        ronde.run(functions.Unreadable)


def test_what_a_function_leaves_in_cycles_is_deleted(tmp_path: Path) -> None:
    ronde.run(functions.leave_notes, (tmp_path,))
    assert {path.name for path in tmp_path.iterdir()} == {"call", "exit", "thread"}


def test_from_another_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(ronde.run(functions.big, (1,), np=2)))
    thread.start()
    thread.join(HANGING_S)
    assert results == [b"\0", b"\1"]


def test_wrong_arguments_are_usage_errors() -> None:
    with pytest.raises(ronde.UsageError, match=r"np=0\) is invalid: expected a whole number above 0"):
        ronde.run(functions.big, (1,), np=0)
    with pytest.raises(ronde.UsageError, match="start_method='fork' is invalid: expected 'spawn' or"):
        ronde.run(functions.big, (1,), start_method="fork")
    with pytest.raises(
        ronde.UsageError, match=r"big and its arguments cannot be sent to workers: .*cannot pickle"
    ):
        ronde.run(functions.big, (threading.Lock(),))
    with pytest.raises(ronde.UsageError, match="0 workers requested"):
        ElasticLaunch(LaunchConfig(WorkerSpec(argv=(), slots=0)), functions.big)
    with pytest.raises(ronde.UsageError, match=r"'train.py' is not callable"):
        ronde.run("train.py", np=2)  # type: ignore[arg-type]


def test_workers_are_started_again(tmp_path: Path) -> None:
    config = LaunchConfig(WorkerSpec(argv=(), slots=2, max_restarts=1))
    launch = ElasticLaunch(config, functions.second_time_lucky)
    assert launch(str(tmp_path)) == {0: "attempt 1", 1: "attempt 1"}


# Functions of a main module.

NOTEBOOK = """
    import ronde
    base = 40
    class Result:
        def __init__(self, value):
            self.value = value

    def double(x):
        return Result(2 * x + base)

    results = ronde.run(double, (1,), np=2)
    print([result.value for result in results], isinstance(results[0], Result))
    print(ronde.run(lambda: base))
"""


@needs_cloudpickle
def test_from_an_interactive_session(tmp_path: Path) -> None:
    code, out, err = python("-q", "-i", folder=tmp_path, stdin=NOTEBOOK)
    assert (code, out) == (0, "[42, 42] True\n[40]\n"), err


def test_without_cloudpickle_the_function_must_be_in_a_file(tmp_path: Path) -> None:
    session = WITHOUT_CLOUDPICKLE + textwrap.dedent(NOTEBOOK)
    _, _, err = python("-q", "-i", folder=tmp_path, stdin=session)
    expected = "it, or an argument, is not in a file that they could import; with"
    assert f"UsageError: double cannot be sent to workers: {expected}" in err
    script = textwrap.dedent(NOTEBOOK).replace("\nresults =", "\nif __name__ == '__main__':\n  results =")
    script = script.replace("\nprint", "\n  print").replace("lambda: base", "double, (2,)")
    (tmp_path / "script.py").write_text(WITHOUT_CLOUDPICKLE + script)
    code, out, err = python("script.py", folder=tmp_path)
    assert code == 0, err
    assert out.startswith("[42, 42] True\n")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", WITHOUT_CLOUDPICKLE], ids=["cloudpickle", "pickle"])
def test_from_a_child_of_multiprocessing(tmp_path: Path, before: str) -> None:
    """There the main module has another name, which both picklers use."""
    script = """
        import multiprocessing
        import ronde
        def one(): return 1
        def outer(): return ronde.run(one, np=2)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(outer), ronde.run(outer))
        """
    (tmp_path / "script.py").write_text(before + textwrap.dedent(script))
    code, out, err = python("script.py", folder=tmp_path)
    assert (code, out) == (0, "[1, 1] [[1, 1]]\n"), err


def test_a_script_that_would_start_itself_again(tmp_path: Path) -> None:
    script = WITHOUT_CLOUDPICKLE + "import ronde\ndef one(): return 1\nprint(ronde.run(one))\n"
    (tmp_path / "script.py").write_text(script)
    code, _, err = python("script.py", folder=tmp_path)
    assert code == 1
    assert 'call ronde.run() under `if __name__ == "__main__":`, or install cloudpickle' in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything(tmp_path: Path, signum: int) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import sys
            import ronde
            sys.path.insert(0, sys.argv[1])
            from tests.ranks.launcher.called_functions import waits
            try:
                ronde.run(waits)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    command = [sys.executable, "script.py", str(Path(__file__).parents[3])]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"[0] ready\n"
    process.send_signal(signum)
    out, _ = process.communicate(timeout=HANGING_S)
    if signum == signal.SIGINT:
        assert (process.returncode, out) == (0, b"interrupted\n")
    else:
        assert process.returncode == -signum
