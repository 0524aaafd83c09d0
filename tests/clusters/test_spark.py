"""`ronde.spark.run` on a real Spark with two executors: results, output, and what the caller gets of every fault."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.clusters.rank_functions import Trained, finds_key, trains_in_place
from tests.clusters.spark_session import PATIENCE_S, ROOT, session_of_two_executors
from tests.conformance.cluster_kinds import agent_of, agents, parent_of
from tests.ranks.comqueue import kmeans
from tests.ranks.pages import blocks, programs, run_program

import ronde
from ronde.comqueue import iterate
from ronde.errors import TimeoutError, UsageError, WorkerError

pytestmark = [pytest.mark.spark, pytest.mark.slow]
spark: Any = pytest.importorskip("ronde.spark", reason="PySpark is not installed here")

FOREVER_S = 600  # how long the other ranks would go on
SOON_S = 120  # long before that; on a quiet machine it takes a second


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with session_of_two_executors() as session:
        yield session.sparkContext


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test after which agents run. Spark starts executors anew, and Py4J keeps connections."""
    yield
    deadline = time.monotonic() + PATIENCE_S
    while agents():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ronde-spark-") as name:
        yield Path(name)


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    options = {"stdout": io.StringIO(), "stderr": io.StringIO(), "num_proc": 2, **options}
    results: list[Any] = spark.run(fn, args, **options)
    return results


def fails(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """Return the error of a job, and how many seconds after its call it came."""
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run(fn, *args, **options)
    return caught.value, time.monotonic() - began


def until_there(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


# Functions of the workers


def sums(factor: int, name: str = "") -> tuple[int, int, int, float, str | None]:
    ronde.init()
    total = ronde.allreduce(float(factor * (ronde.rank() + 1)), op=ronde.Sum)
    print("rank", ronde.rank(), "is done")
    return ronde.rank(), ronde.local_rank(), ronde.local_size(), float(total), os.environ.get(name)


def raises_before_init() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("no such column")
    time.sleep(FOREVER_S)


def exits(code: int) -> None:
    if os.environ["RANK"] == "0":
        sys.exit(code)
    time.sleep(FOREVER_S)


def waits(folder: Path) -> None:
    """Note the processes of rank 1: the rank, its agent, Spark's Python worker and daemon, and the executor."""
    if os.environ["RANK"] == "1":
        pids = [os.getpid(), agent_of(os.getpid())]
        for _ in range(3):
            pids.append(parent_of(pids[-1]))
        (folder / "new").write_text(" ".join(map(str, pids)))
        (folder / "new").rename(folder / "pids")
    time.sleep(FOREVER_S)


def waits_alone(flag: Path) -> None:
    flag.touch()
    time.sleep(FOREVER_S)


def kill_executor() -> None:
    """Kill the executor of this rank, with all its processes."""
    python_worker = parent_of(agent_of(os.getpid()))
    os.kill(parent_of(parent_of(python_worker)), signal.SIGKILL)


# What users rely on


def test_results_come_by_rank_and_output_with_prefixes(context: Any) -> None:
    output, messages = io.StringIO(), io.StringIO()
    env = {"GREETING": "hello"}
    results = run(sums, 2, kwargs={"name": "GREETING"}, env=env, stdout=output, stderr=messages)
    assert results == [(0, 0, 2, 6.0, "hello"), (1, 1, 2, 6.0, "hello")]
    lines = sorted(line.partition(":")[2] for line in output.getvalue().splitlines())
    assert lines == ["0] rank 0 is done", "1] rank 1 is done"]
    assert "Spark: all 2 tasks have registered" in messages.getvalue()


def test_run_returns_when_its_tasks_have_ended(context: Any) -> None:
    """If the program ended before them, the JVM would write an error of 20 lines to the screen."""
    run(sums, 2)
    assert not context.statusTracker().getActiveJobsIds()


def test_the_example_of_digits_trains_on_spark(context: Any) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
    import runpy

    def train() -> None:
        sys.argv = ["digits.py"]
        runpy.run_path(str(ROOT / "examples" / "digits.py"), run_name="__main__")

    output = io.StringIO()
    run(train, stdout=output)
    assert any("held-out accuracy: 0.9" in line for line in output.getvalue().splitlines())


_HOROVOD = """
import ronde.compat
import horovod.spark
from pyspark.sql import SparkSession

SparkSession.builder.master("local[2]").getOrCreate()


def fn(magic_number):
    import horovod.torch as hvd

    hvd.init()
    print("Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d" % (
        hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number))
    return hvd.rank()


print("Result:", horovod.spark.run(fn, args=(4242,), num_proc=2))
"""


def test_a_program_for_horovod_on_spark_runs_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed here")
    program = tmp_path / "on_horovod.py"
    program.write_text(_HOROVOD)
    run_it = partial(
        subprocess.run, [sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    done = run_it(env={**os.environ, "PYSPARK_PYTHON": str(tmp_path / "bare" / "bin" / "python")})
    assert "the Python of the executors does not find Ronde: install it there" in done.stderr
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = run_it(env={**env, "HOROVOD_SPARK_START_TIMEOUT": "soon"})
    assert "HOROVOD_SPARK_START_TIMEOUT='soon' is invalid" in done.stderr
    done = run_it(env={**env, "HOROVOD_SPARK_START_TIMEOUT": "240"})
    assert done.returncode == 0, done.stderr
    assert "Result: [0, 1]" in done.stdout
    for rank in (0, 1):
        said = f"Hello, rank = {rank}, local_rank = {rank}, size = 2, local_size = 2, magic_number = 4242"
        assert f"[{rank}]<stdout>:{said}\n" in done.stdout


def test_horovods_words_stand_in_the_errors(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs match them."""
    import ronde.compat

    monkeypatch.syspath_prepend(ronde.compat.PACKAGES)
    horovod = importlib.import_module("horovod.spark")
    with pytest.raises(TimeoutError, match=r"^Timed out waiting for Spark tasks to start: .*registered"):
        horovod.run(os.getpid, num_proc=3, start_timeout=3, verbose=0)  # of two slots
    with pytest.raises(
        RuntimeError, match=r"one or more processes exited with non-zero status: rank \d .*exit code 3"
    ):
        horovod.run(partial(sys.exit, 3), num_proc=2, verbose=0)


def test_horovods_question_for_the_gpus_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    import ronde.compat

    monkeypatch.syspath_prepend(ronde.compat.PACKAGES)
    devices = importlib.import_module("horovod.spark.task").get_available_devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,1,0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices() == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert devices() == ["3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices() == []


def test_two_jobs_at_once_in_threads(context: Any) -> None:
    results: dict[int, Any] = {}

    def job(number: int) -> None:
        results[number] = run(sums, number, num_proc=1)

    threads = [threading.Thread(target=job, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [(0, 0, 1, 1.0, None)], 2: [(0, 0, 1, 2.0, None)]}


def test_the_key_of_the_job_is_seen_nowhere(context: Any) -> None:
    output, messages = io.StringIO(), io.StringIO()
    assert run(finds_key, num_proc=1, stdout=output, stderr=messages) == [[]]


# Faults


def test_more_ranks_than_slots_are_an_error_with_numbers(context: Any) -> None:
    run(sums, 1)  # Spark has started its Python workers then
    began = time.monotonic()
    messages = io.StringIO()
    with pytest.raises(
        TimeoutError, match=r"registered 2 of 4 on host .*; Spark has 2 slots, 0 of them free"
    ):
        run(sums, 1, num_proc=4, start_timeout=8, stderr=messages)
    wait = r"waiting for tasks: registered 2 of 4 on host .*; Spark has 2 slots, 0 of them free; the job ends if .* s\n"
    assert re.search(wait, messages.getvalue()), messages.getvalue()
    assert time.monotonic() - began < 8 + SOON_S
    assert len(run(sums, 1)) == 2  # the slots are free again


def test_an_exception_on_one_rank_ends_the_others(context: Any) -> None:
    error, took_s = fails(raises_before_init)
    assert (error.rank, error.exit_code) == (1, 1)
    assert "LookupError: no such column" in str(error)
    assert "in raises_before_init" in error.traceback_text
    assert error.host
    assert took_s < SOON_S


def test_an_exit_code_is_never_a_success(context: Any) -> None:
    error, took_s = fails(exits, 3)
    assert (error.rank, error.exit_code) == (0, 3)
    assert took_s < SOON_S


@pytest.mark.parametrize("victim", ["rank", "agent", "Python worker", "executor"])
def test_a_killed_process_is_an_error_at_the_driver(context: Any, folder: Path, victim: str) -> None:
    names = ["rank", "agent", "Python worker", "daemon", "executor"]
    killed_at: list[float] = []

    def kill() -> None:
        until_there(folder / "pids")
        os.kill(int((folder / "pids").read_text().split()[names.index(victim)]), signal.SIGKILL)
        killed_at.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerError) as caught:
        run(waits, folder)
    took_s = time.monotonic() - killed_at[0]
    thread.join()
    assert took_s < SOON_S
    if victim == "rank":
        assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    else:
        assert "task" in str(caught.value)
    deadline = time.monotonic() + PATIENCE_S
    for pid in map(int, (folder / "pids").read_text().split()[:2]):  # nothing of the job keeps running
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(("how", "has_folder"), [("kill", False), ("lose", False), ("lose", True)])
def test_a_lost_task_changes_no_bit_of_an_iteration(
    context: Any, folder: Path, how: str, has_folder: bool
) -> None:
    def mean(flag: Path, on: str, saved: Path | None) -> bytes:
        queue = kmeans.noisy_queue(str(flag), at_step=7, how=how)
        queue.set_checkpoint(every=3, folder=None if saved is None else str(saved))
        bits: bytes = queue.exec(on)[0][0].tobytes()
        return bits

    expected = mean(folder, "threads:2", folder / "of threads")
    assert mean(folder / "died", "spark:2", folder / "saved" if has_folder else None) == expected
    assert (folder / "died").exists()


@pytest.mark.parametrize("how", ["kill", "lose"])
def test_a_task_lost_in_step_7_of_20_changes_no_bit_of_k_means(context: Any, folder: Path, how: str) -> None:
    expected = kmeans.centers_after_loss(folder, "threads:2")  # no loss: the path exists
    assert expected[1] == 20
    assert kmeans.centers_after_loss(folder / "died", "spark:2", how) == expected
    assert (folder / "died").exists()


def test_a_cancelled_spark_job_releases_every_wait(context: Any, folder: Path) -> None:
    def cancel() -> None:
        until_there(folder / "pids")
        context.cancelAllJobs()

    thread = threading.Thread(target=cancel)
    thread.start()
    error, took_s = fails(waits, folder)
    thread.join()
    assert "the Spark job was cancelled" in str(error)
    assert took_s < 2 * SOON_S


@pytest.mark.parametrize("kind", ["run", "run_elastic", "iterate"])
def test_the_job_group_of_the_caller_cancels_a_job(context: Any, folder: Path, kind: str) -> None:
    """As the button of a notebook does."""

    def cancel() -> None:
        until_there(folder / "pids")
        context.cancelJobGroup("cell 7")

    def start() -> Any:
        if kind == "iterate":
            return iterate(lambda c: waits(folder), data=[1.0, 2.0], state={}, max_iter=1, on="spark:2")
        return getattr(spark, kind)(waits, (folder,), num_proc=2, stdout=io.StringIO(), stderr=io.StringIO())

    thread = threading.Thread(target=cancel)
    context.setJobGroup("cell 7", "a cell of a notebook")
    try:
        thread.start()
        with pytest.raises(WorkerError, match=r"the Spark job was cancelled: .*group cell 7"):
            start()
        assert context.getLocalProperty("spark.jobGroup.id") == "cell 7"
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
        context.setLocalProperty("spark.job.description", None)
    thread.join()


def test_mistakes_are_named_before_any_task_starts(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    with pytest.raises(UsageError, match="cannot be sent to workers"):
        run(sums, threading.Lock())
    frame = SparkSession(context).range(3)
    for captures in (lambda: context.version, lambda: [frame.count()]):
        with pytest.raises(
            UsageError,
            match=r"the variable '(context|frame)' of .* is of type pyspark\S+, which exists only in",
        ):
            run(captures)
    with pytest.raises(UsageError, match="start_timeout"):
        run(sums, 1, start_timeout=0)
    monkeypatch.setenv("PYSPARK_PIN_THREAD", "false")
    with pytest.raises(UsageError, match="PYSPARK_PIN_THREAD=false keeps Ronde from cancelling"):
        run(sums, 1)


def test_an_elastic_job_goes_on_without_its_executor_and_at_full_size_again(
    context: Any, folder: Path
) -> None:
    """The process of the other executor goes on from the last commit, and that of a new one joins it later."""
    messages = io.StringIO()
    first, second = spark.run_elastic(
        trains_in_place,
        (folder, kill_executor),
        min_num_proc=1,
        max_num_proc=2,
        stdout=io.StringIO(),
        stderr=messages,
    )
    assert first.entries[:2] == [0, 10], messages.getvalue()
    assert second == Trained(1, 2, first.entries[-1:])


# In a process of its own

_WITH_PAGES = """
import json, sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from tests.clusters.rank_functions import finds_key_in_spark
from tests.clusters.spark_session import new_session
import ronde.spark
logs = Path({folder!r})
session = new_session(
    spark_ui_enabled="true", spark_ui_port="0", spark_eventLog_enabled="true", spark_eventLog_dir=logs.as_uri()
)
context = session.sparkContext
import pyspark
work = Path(pyspark.__file__).parent / "work" / context.applicationId  # what executors print
assert work.is_dir()
session.sql("select 1").collect()
found, seen = ronde.spark.run(finds_key_in_spark, (context.uiWebUrl, [logs, work]), num_proc=1)[0]
session.stop()
print(json.dumps([found, seen, [file.name for file in logs.iterdir()]]))
"""


def test_no_page_or_log_of_spark_shows_the_key(folder: Path) -> None:
    program = _WITH_PAGES.format(root=str(ROOT), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found, seen, logs = json.loads(done.stdout.splitlines()[-1])
    assert found == []
    assert logs
    for page in (
        "/environment",
        "/executors",
        "/jobs/job",
        "/stages/stage",
        "/environment/",
        "stages?details=true",
    ):
        assert any(page in each for each in seen), (page, seen)


_DRIVER = """
import sys
sys.path[:0] = [{root!r}]
from pathlib import Path
from tests.clusters.rank_functions import finds_key
from tests.clusters.spark_session import new_session
from tests.clusters.test_spark import waits
import ronde.spark
new_session()
ronde.spark.run(waits, (Path({folder!r}),), num_proc=2)
"""


def test_nothing_keeps_running_after_the_driver_is_killed(folder: Path) -> None:
    program = _DRIVER.format(root=str(ROOT), folder=str(folder))
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until_there(folder / "pids")
    finally:
        driver.kill()
        driver.wait()
    rank, agent = map(int, (folder / "pids").read_text().split()[:2])
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{rank}").exists() or Path(f"/proc/{agent}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_warning_names_another_python_of_the_executors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark import SparkConf

    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    conf = SparkConf(loadDefaults=False)
    context = SimpleNamespace(master="spark://host:7077", pythonExec="python3", _conf=conf)
    spark.SparkCluster(context)
    assert f"the executors run python3, and this program runs {sys.executable}: if they fail" in caplog.text
    assert context.pythonExec == "python3"
    caplog.clear()
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    spark.SparkCluster(context)
    assert "the executors run" not in caplog.text


_STOPS = """
import sys, threading
sys.path[:0] = [{root!r}]
from pathlib import Path
from tests.clusters.spark_session import new_session
from tests.clusters.test_spark import until_there, waits_alone
import ronde.spark
session = new_session()
flag = Path({folder!r}) / "there"
def stop():
    until_there(flag)
    session.stop()
thread = threading.Thread(target=stop)
thread.start()
try:
    ronde.spark.run(waits_alone, (flag,), num_proc=1)
except ronde.WorkerError as error:
    print("raised:", error)
thread.join()
"""


def test_a_session_that_is_stopped_during_a_run_is_named(folder: Path) -> None:
    program = _STOPS.format(root=str(ROOT), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "raised: the Spark session has been stopped: start a new one" in done.stdout, done.stderr


_TOO_MANY = """
try:
    ronde.spark.run(train, args=[10], num_proc=3)
except Exception as error:
    print("refused:", error)
"""


def test_the_first_program_in_a_bare_shell(tmp_path: Path) -> None:
    """`venv/bin/python on_spark.py`: tasks run the same Python, and the program leaves no trace of Java behind."""
    program = next(block for block in blocks("docs/spark.md", "python") if "ronde.spark.run" in block)
    (tmp_path / "on_spark.py").write_text(program + _TOO_MANY)
    env = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    own = os.path.dirname(sys.executable)
    env["PATH"] = os.pathsep.join(path for path in env["PATH"].split(os.pathsep) if path != own)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "on_spark.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "[10.0, 10.0]" in done.stdout, done.stderr
    assert "\tat " not in done.stderr
    assert " ERROR " not in done.stderr


@pytest.mark.parametrize(("program", "command"), programs("spark"))
def test_the_program_of_the_page_runs(program: str, command: str, tmp_path: Path) -> None:
    outputs = {
        "TorchEstimator": "y__output",
        "SparkEstimator": "|prediction|",
        "comqueue": "mean: 249.75",
        "ronde.ml": "(1, 2) (8, 2)",
        "ronde.spark.run": "[10.0, 10.0]",
    }
    expected = next(output for used, output in outputs.items() if used in program)
    assert expected in run_program(program, command, tmp_path)
