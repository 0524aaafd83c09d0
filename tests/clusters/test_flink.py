"""Ronde on a real Flink of this machine, with two TaskManagers of one slot: `ronde.flink.run`, and the page."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.flink_cluster import ROOT, Flink, flink_cluster
from tests.conformance.cluster_kinds import SLOTS, agents, silenced
from tests.ranks.pages import programs, run_program

import ronde
from ronde.errors import UsageError, WorkerError

pytestmark = [pytest.mark.flink, pytest.mark.slow]
pytest.importorskip("pyflink", reason="PyFlink is not installed here")

PATIENCE_S = 480  # against hanging only


@pytest.fixture(scope="module")
def flink() -> Iterator[Flink]:
    with flink_cluster() as flink:
        yield flink


def run(flink: Flink, fn: Any, *args: Any, **options: Any) -> list[Any]:
    import ronde.flink

    return ronde.flink.run(fn, args, settings=flink.settings, **options)


def sums(factor: int, name: str = "") -> tuple[int, float, str | None]:
    ronde.init()
    total = ronde.allreduce(ronde.rank() * factor, op=ronde.Sum)
    print("rank", ronde.rank(), "is done")
    return ronde.rank(), float(total), os.environ.get(name)


def test_a_function_runs_on_all_free_slots_and_frees_them(flink: Flink) -> None:
    output, before = io.StringIO(), job_ids(flink)
    results = run(flink, sums, 3, env={"GREETING": "hello"}, kwargs={"name": "GREETING"}, stdout=output)
    assert results == [(0, 3.0, "hello"), (1, 3.0, "hello")]
    assert sorted(line.partition("] ")[2] for line in output.getvalue().splitlines()) == [
        "rank 0 is done",
        "rank 1 is done",
    ]
    assert flink.ask("overview")["slots-available"] == SLOTS
    (job,) = job_ids(flink) - before
    assert flink.ask(f"jobs/{job}")["state"] == "FINISHED"


def test_two_runs_at_once_each_in_a_slot(flink: Flink) -> None:
    results: dict[int, list[Any]] = {}

    def job(number: int) -> None:
        results[number] = run(flink, sums, number, num_proc=1)

    threads = [threading.Thread(target=job, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [(0, 0.0, None)], 2: [(0, 0.0, None)]}


def test_a_job_that_is_cancelled_in_flink_ends_all_ranks(flink: Flink) -> None:
    def cancel() -> None:
        wait_for_agents(SLOTS)
        (job,) = [job["jid"] for job in flink.ask("jobs/overview")["jobs"] if job["state"] == "RUNNING"]
        flink.ask(f"jobs/{job}?mode=cancel", "PATCH")

    with concurrently(cancel), pytest.raises(WorkerError) as caught:
        run(flink, time.sleep, 600)
    assert not caught.value.has_lost_task  # so an iteration with checkpoints does not start again
    wait_for_agents(0)


def test_too_few_slots_are_an_error_with_numbers(flink: Flink) -> None:
    with pytest.raises(WorkerError, match=r"it needs 3 slots, and Flink has 2 slots, 2 of them free"):
        run(flink, sums, 1, num_proc=3)


def test_a_cluster_that_does_not_answer_is_named(flink: Flink) -> None:
    import ronde.flink

    settings = {**flink.settings, "rest.port": "1"}
    with pytest.raises(UsageError, match=r"no Flink cluster answers at http://127\.0\.0\.1:1: "):
        ronde.flink.run(sums, (1,), settings=settings)


def test_a_cancellation_ends_a_question_that_has_no_answer(flink: Flink) -> None:
    """Also the driver's own, so that no thread is in Py4J when the program ends."""
    from ronde.flink import FlinkCluster

    with silenced(f"127.0.0.1:{flink.settings['rest.port']}") as (there, silence):
        cluster = FlinkCluster({**flink.settings, "rest.port": there.rpartition(":")[2]})
        silence()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cluster.capacity)
            while not answer.done():
                cluster.cancel("the test is over")
                time.sleep(0.05)
        with pytest.raises(UsageError, match="has not answered until the job was cancelled"):
            answer.result()


ITERATION = """
from ronde.comqueue import iterate
import numpy as np

def step(c):
    c.state.total = c.state.total * 0.1 + c.sum(np.sin(c.data * c.step_no).sum(axis=0))

if __name__ == "__main__":
    rows = np.arange(1000.0).reshape(100, 10)
    first, second = (
        iterate(step, data=rows, state={"total": 0.0}, max_iter=3, on=on).state.total.tobytes()
        for on in ("flink:2", "local:2")
    )
    assert first == second
"""
WAITING = "import ronde, time; ronde.run(time.sleep, (600,), np=2, cluster='flink')"


def test_the_configuration_of_flink_names_the_cluster(flink: Flink, tmp_path: Path) -> None:
    program, before = tmp_path / "iteration.py", job_ids(flink)
    program.write_text(ITERATION)
    subprocess.run([sys.executable, program], env=environment_for(flink, tmp_path), check=True)
    assert len(job_ids(flink) - before) == 1


def test_a_killed_program_leaves_nothing(flink: Flink, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, env=environment_for(flink, tmp_path)) as program:
        wait_for_agents(SLOTS)
        program.kill()
    wait_for_agents(0)
    flink.wait_for_slots(SLOTS)


TASK_MANAGER = "//flink@10.0.0.7:6122/user/rpc/taskmanager_0"


def test_an_unencrypted_way_of_the_key_is_refused() -> None:
    from ronde.flink.cluster import check_encryption

    check_encryption(["https://jobs:8081", f"pekko.ssl.tcp:{TASK_MANAGER}"], True)
    check_encryption(["http://localhost:8081", "pekko.tcp://flink@127.0.0.1:6122/user"], True)
    for urls in (["http://jobs:8081"], ["https://jobs:8081", f"pekko.tcp:{TASK_MANAGER}"]):
        with pytest.raises(UsageError, match=r"set security\.ssl\.internal\.enabled and"):
            check_encryption(urls, True)


@pytest.mark.parametrize(("program", "command"), programs("flink"))
def test_the_program_of_the_page_runs(program: str, command: str, tmp_path: Path) -> None:
    expected = "mean: 249.75" if "comqueue" in program else "[10.0, 10.0]"
    assert expected in run_program(program, command, tmp_path)


def test_a_killed_task_manager_ends_all_ranks(flink: Flink) -> None:
    """Comes last: until `flink_cluster` is used again, a single TaskManager remains."""

    def kill() -> None:
        wait_for_agents(SLOTS)
        flink.task_managers.pop().kill()

    with concurrently(kill), pytest.raises(WorkerError) as caught:
        run(flink, time.sleep, 600)
    assert caught.value.has_lost_task
    wait_for_agents(0)


def job_ids(flink: Flink) -> set[str]:
    """Return the numbers of all jobs that the cluster has had."""
    return {job["jid"] for job in flink.ask("jobs/overview")["jobs"]}


def environment_for(flink: Flink, folder: Path) -> dict[str, str]:
    """Return the environment of a program for which Flink's configuration names the cluster."""
    import pyflink

    installed = (Path(pyflink.__path__[0]) / "conf" / "config.yaml").read_text()
    # Without which Java 17 is too strict.
    (java_options,) = re.findall("^ +all: (.+)", installed, re.MULTILINE)
    lines = [f"{name}: {value}\n" for name, value in flink.settings.items()]
    (folder / "config.yaml").write_text("".join([f"env.java.opts.all: {java_options}\n", *lines]))
    return {**os.environ, "FLINK_CONF_DIR": str(folder), "PYTHONPATH": str(ROOT)}


@contextmanager
def concurrently(function: Callable[[], None]) -> Iterator[None]:
    """Call a function in another thread, and wait for its end."""
    thread = threading.Thread(target=function)
    thread.start()
    yield
    thread.join()


def wait_for_agents(count: int) -> None:
    """Wait until this number of agents runs."""
    deadline = time.monotonic() + PATIENCE_S
    while len(agents()) != count:
        assert time.monotonic() < deadline, agents()
        time.sleep(0.05)
