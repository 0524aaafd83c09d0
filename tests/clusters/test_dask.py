"""Ronde on a real Dask cluster of this machine, with two workers of one thread: `ronde.dask.run`, and the page."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cluster_kinds import dask_scheduler
from tests.ranks.pages import programs, run_program

import ronde
from ronde.errors import TimeoutError, UsageError, WorkerError

pytestmark = [pytest.mark.dask, pytest.mark.slow]
distributed: Any = pytest.importorskip("distributed", reason="Dask is not installed here")


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with dask_scheduler() as address, distributed.Client(address) as client:
        yield client


def run(client: Any, fn: Any, *args: Any, **options: Any) -> list[Any]:
    import ronde.dask

    return ronde.dask.run(client, fn, args, **options)


def sums(factor: int, name: str = "") -> tuple[int, float, str | None]:
    ronde.init()
    total = ronde.allreduce(ronde.rank() * factor, op=ronde.Sum)
    print("rank", ronde.rank(), "is done")
    return ronde.rank(), float(total), os.environ.get(name)


def test_a_function_runs_on_all_free_threads(client: Any) -> None:
    output = io.StringIO()
    results = run(client, sums, 3, env={"GREETING": "hello"}, kwargs={"name": "GREETING"}, stdout=output)
    assert results == [(0, 3.0, "hello"), (1, 3.0, "hello")]
    assert sorted(line.partition("] ")[2] for line in output.getvalue().splitlines()) == [
        "rank 0 is done",
        "rank 1 is done",
    ]


def test_the_subscriptions_of_the_client_stay(client: Any) -> None:
    events: list[Any] = []
    client.subscribe_topic("all", events.append)
    run(client, sums, 1, num_proc=1)
    client.log_event("all", "still there")
    deadline = time.monotonic() + 60
    while "still there" not in [message for _, message in events]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    client.unsubscribe_topic("all")


def test_futures_among_the_arguments_are_replaced_by_their_results(client: Any) -> None:
    def add(x: int, more: dict[str, list[int]], *, y: int) -> int:
        return x + sum(more["numbers"]) + y

    one, two = client.scatter(1), client.submit(abs, -2)
    assert run(client, add, one, {"numbers": [two, 3]}, kwargs={"y": two}, num_proc=2) == [8, 8]
    with pytest.raises(ZeroDivisionError):
        run(client, add, client.submit(divmod, 1, 0), {}, num_proc=1)


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    time.sleep(600)


def test_the_first_failure_is_what_the_caller_gets(client: Any) -> None:
    with pytest.raises(WorkerError, match="LookupError: no such thing") as caught:
        run(client, fail_on_rank_1, num_proc=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_too_few_threads_are_an_error_with_numbers(client: Any) -> None:
    with pytest.raises(TimeoutError, match=r"registered 2 of 3 .*Dask has 2 slots, 0 of them free"):
        run(client, sums, 1, num_proc=3, start_timeout=3)


def test_connections_may_be_encrypted(client: Any) -> None:
    assert run(client, os.getenv, "RONDE_PROTECTION", num_proc=1, encrypt=True) == ["secret"]


def test_two_runs_at_once(client: Any) -> None:
    results: dict[int, list[Any]] = {}

    def job(number: int) -> None:
        results[number] = run(client, sums, number, num_proc=1)

    threads = [threading.Thread(target=job, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [(0, 0.0, None)], 2: [(0, 0.0, None)]}


def test_a_closed_client_is_refused() -> None:
    with dask_scheduler() as address:
        client = distributed.Client(address)
        client.close()
        with pytest.raises(UsageError, match="give an open one"):
            run(client, sums, 1, num_proc=1)


def test_an_asynchronous_client_is_named_as_such(client: Any) -> None:
    """Also as the default client, as in a notebook that works with `await`."""

    async def start() -> None:
        address = client.scheduler.address
        async with distributed.Client(address, asynchronous=True):
            ronde.run(sums, (1,), np=1, cluster="dask")

    with pytest.raises(UsageError, match=r"the Dask client is asynchronous, .*: give one that is not"):
        asyncio.run(start())


def test_an_asynchronous_client_and_what_is_none_are_refused() -> None:
    with pytest.raises(UsageError, match="asynchronous"):
        run(types.SimpleNamespace(asynchronous=True), sums, 1)
    with pytest.raises(UsageError, match=r"'127.0.0.1:1' is no Dask client: give distributed.Client"):
        run("127.0.0.1:1", sums, 1)


@pytest.mark.parametrize(("program", "command"), programs("dask"))
def test_the_program_of_the_page_runs(program: str, command: str, tmp_path: Path) -> None:
    expected = "mean: 499.5" if "iterate" in program else "[10.0, 10.0]"
    assert expected in run_program(program, command, tmp_path)
