"""Ronde on a real Ray cluster of this machine, with two CPUs: the executor, its placement, and the page."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.rank_functions import Trained, trains_in_place
from tests.conformance.cluster_kinds import agent_of, agents, parent_of, ray_engine
from tests.ranks.pages import programs, run_program

import ronde
from ronde.errors import RondeError, TimeoutError, UnsupportedError, UsageError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ray: Any = pytest.importorskip("ray", reason="Ray is not installed here")


@pytest.fixture(scope="module", autouse=True)
def _engine() -> Iterator[None]:
    with ray_engine():
        yield


@pytest.fixture(autouse=True)
def _no_agents_stay() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60
    while agents():
        assert time.monotonic() < deadline, "agents still run"
        time.sleep(0.05)


def executor(**options: Any) -> Any:
    from ronde.ray import RayExecutor

    return RayExecutor(**options)


class Counter:
    """An executable: what stays in a worker."""

    def __init__(self, first: int, step: int = 1) -> None:
        self.count, self.step = first, step

    def advance(self) -> int:
        self.count += self.step
        return self.count


def sums(factor: int) -> tuple[int, float, int]:
    ronde.init()
    total = ronde.allreduce(ronde.rank() * factor, op=ronde.Sum)
    return ronde.rank(), float(total), os.getpid()


def test_workers_stay_between_calls() -> None:
    workers = executor(num_workers=2)
    workers.start(Counter, [10], {"step": 5}, extra_env_vars={"GREETING": "hello"})
    first, second = workers.run(sums, [3]), workers.run(sums, kwargs={"factor": 4})
    assert [(rank, total) for rank, total, _ in first] == [(0, 3.0), (1, 3.0)]
    assert [(rank, total) for rank, total, _ in second] == [(0, 4.0), (1, 4.0)]
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert workers.execute_single(lambda counter: counter.advance()) == 15
    assert workers.execute(lambda counter: counter.advance()) == [20, 15]
    references = [workers.run_remote(os.getenv, [name]) for name in ("GREETING", "RANK")]
    assert [ray.get(reference) for reference in references] == [["hello", "hello"], ["0", "1"]]
    large = bytes(3_000_000)
    assert workers.run(lambda value: value, [large]) == [large, large]
    workers.shutdown()
    workers.shutdown()
    with pytest.raises(UsageError, match=r"has no workers: call start\(\) first"):
        workers.run(sums, [1])


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    time.sleep(600)


def test_a_failure_ends_the_workers_and_the_executor_starts_again() -> None:
    workers = executor(num_workers=2)
    workers.start()
    with pytest.raises(UsageError, match="5 cannot be called"):
        workers.run(5)
    later = workers.run_remote(fail_on_rank_1)
    with pytest.raises(WorkerError, match="LookupError: no such thing") as caught:
        workers.run(sums, [1])
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match="LookupError: no such thing"):
        ray.get(later)
    workers.start()
    assert [rank for rank, *_ in workers.run(sums, [1])] == [0, 1]
    workers.shutdown()


def test_a_shutdown_ends_calls_at_once_with_an_error_that_says_so() -> None:
    workers = executor(num_workers=2)
    workers.start()
    done, running = workers.run_remote(os.getenv, ["RANK"]), workers.run_remote(time.sleep, [600])
    assert ray.get(done) == ["0", "1"]
    workers.shutdown()
    with pytest.raises(
        RondeError, match=r"shut down before the call ended: take its results before shutdown\(\)"
    ):
        ray.get(running)


def test_ctrl_c_ends_the_workers_and_later_calls_say_so(tmp_path: Path) -> None:
    workers = executor(num_workers=2)
    workers.start()

    def wait() -> None:
        (tmp_path / os.environ["RANK"]).touch()
        time.sleep(600)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        workers.run(wait)
    with pytest.raises(RondeError, match=r"was interrupted, .*: call start\(\) for new ones"):
        workers.run(sums, [1])
    with pytest.raises(RondeError, match=r"was interrupted, .*: call start\(\) for new ones"):
        workers.execute(str)
    workers.start()
    assert [rank for rank, *_ in workers.run(sums, [1])] == [0, 1]
    workers.shutdown()


def test_an_executable_that_fails_fails_the_start() -> None:
    workers = executor(num_workers=2)
    with pytest.raises(WorkerError, match="TypeError"):
        workers.start(Counter, ["too", "many", "arguments"])


def test_too_few_slots_are_an_error_with_numbers() -> None:
    from ronde.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=1, placement_group_timeout_s=1)
    with pytest.raises(TimeoutError, match=r"registered 0 of 3 .*Ray has 2 slots, 2 of them free"):
        executor(settings=settings, num_workers=3).start()


def kill_actor() -> None:
    os.kill(parent_of(agent_of(os.getpid())), signal.SIGKILL)


def test_an_elastic_run_starts_its_own_workers_which_go_on_without_a_lost_one(tmp_path: Path) -> None:
    """The process of rank 0 goes on from the last commit, and that of a new worker joins it."""
    workers = executor(min_workers=1, max_workers=2)
    workers.start()
    first, second = workers.run(trains_in_place, [tmp_path, kill_actor])
    assert first.entries[:2] == [0, 10]
    assert second == Trained(1, 2, first.entries[-1:])
    with pytest.raises(UnsupportedError, match="elastic"):
        workers.run_remote(sums, [1])


def test_workers_run_in_the_placement_group_of_the_caller() -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def train() -> list[int]:
        workers = executor(num_workers=2)
        workers.start()
        ranks = [rank for rank, *_ in workers.run(sums, [1])]
        workers.shutdown()
        return ranks

    group = placement_group([{"CPU": 1}, {"CPU": 1}])  # all CPUs: outside of it there is no room
    strategy = PlacementGroupSchedulingStrategy(group)
    caller = ray.remote(num_cpus=0, scheduling_strategy=strategy)(train)
    assert ray.get(caller.remote(), timeout=120) == [0, 1]
    remove_placement_group(group)


def test_encrypted_workers_of_a_registered_cluster() -> None:
    from ronde.ray import RayExecutor

    workers = executor(settings=RayExecutor.create_settings(encrypt=True), num_workers=2)
    workers.start()
    assert workers.run(os.getenv, ["RONDE_PROTECTION"]) == ["secret", "secret"]
    workers.shutdown()
    assert ronde.run(os.getenv, ["RANK"], np=2, cluster="ray") == ["0", "1"]


class Learner:
    """An executable of a program for Horovod."""

    def __init__(self) -> None:
        self.horovod = importlib.import_module("horovod")


def test_programs_for_horovod_run_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    import ronde.compat

    monkeypatch.syspath_prepend(ronde.compat.PACKAGES)
    horovod = importlib.import_module("horovod.ray")
    workers = horovod.RayExecutor(horovod.RayExecutor.create_settings(30, verbose=0), num_workers=2)
    workers.start(executable_cls=Learner)
    module = partial(importlib.import_module, "horovod.common.util")
    assert ray.get(workers.run_remote(lambda: module().is_iterable([]))) == [True, True]
    assert workers.run(lambda: module().is_iterable(1)) == [False, False]
    versions = workers.execute(lambda learner: learner.horovod.__version__)
    assert versions == [workers.execute_single(lambda learner: learner.horovod.__version__)] * 2
    workers.shutdown()
    settings = horovod.ElasticRayExecutor.create_settings(min_num_proc=1, max_np=2, verbose=False)
    elastic = horovod.ElasticRayExecutor(settings, env_vars={"GREETING": "hello"})
    elastic.start()
    assert set(elastic.run(partial(os.getenv, "GREETING"))) == {"hello"}
    with pytest.raises(UnsupportedError, match="callbacks are not supported"):
        elastic.run(os.getcwd, callbacks=[print])


def test_horovods_modules_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ronde.compat

    monkeypatch.syspath_prepend(ronde.compat.PACKAGES)
    discovery = importlib.import_module("horovod.ray.elastic").RayHostDiscovery
    assert importlib.import_module("horovod.ray.elastic_v2").RayHostDiscovery is discovery
    cpus = int(ray.cluster_resources()["CPU"])
    assert list(discovery().find_available_hosts_and_slots().values()) == [cpus]
    assert discovery(cpus_per_slot=cpus + 1).find_available_hosts_and_slots() == {}
    assert discovery(use_gpu=True, gpus_per_slot=64).find_available_hosts_and_slots() == {}
    for line, instead in (
        ("from horovod.ray import BaseHorovodWorker", "give RayExecutor.start an executable_cls"),
        ("from horovod.ray import ray_logger", "print in the function"),
        ("import horovod.ray.ray_logger", "print in the function"),
        ("from horovod.ray.elastic_v2 import ElasticParams", "use horovod.ray.RayExecutor with min_workers"),
    ):
        with pytest.raises(ImportError, match=instead):
            exec(line)


def test_contradictory_numbers_are_refused() -> None:
    for options in ({}, {"num_workers": 2, "num_hosts": 1}, {"num_workers": 2, "min_workers": 1}):
        with pytest.raises(UsageError, match="expected one of them"):
            executor(**options)
    with pytest.raises(UsageError, match="use_gpu=True"):
        executor(num_workers=2, gpus_per_worker=1)


@pytest.mark.parametrize(("program", "command"), programs("ray"))
def test_the_program_of_the_page_runs(program: str, command: str, tmp_path: Path) -> None:
    assert "[10.0, 10.0]" in run_program(program, command, tmp_path)
