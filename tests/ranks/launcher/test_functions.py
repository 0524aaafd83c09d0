"""Functions in tasks of a cluster, which here is this machine: results, output, and what the caller gets of faults."""

from __future__ import annotations

import io
import re
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.ranks.launcher.called_functions import (
    big,
    dies_on,
    exits,
    exits_late,
    fails_again,
    goes_on,
    greet,
    module_path,
    one_fails,
    protection,
    sizes,
)

from ronde import TimeoutError, UsageError, WorkerError
from ronde.launch.clusters.cluster import Capacity, SlotEvents, Ticket
from ronde.launch.clusters.local import LocalCluster
from ronde.launch.driver.functions import run_function
from ronde.launch.job_options import RunOptions

SECOND = 10**9


def run(fn: Any, *args: Any, workers: int = 2, slots: int = 2, **options: Any) -> list[Any]:
    return run_function(LocalCluster(slots), fn, args, {}, RunOptions(workers, **options))


def test_a_function_runs_in_every_task_and_its_results_come_by_rank() -> None:
    assert run(sizes, 2) == [(0, 0, 2, 4.0), (1, 1, 2, 4.0)]


def test_output_of_the_workers_appears_where_the_caller_wants_it() -> None:
    out, err = io.StringIO(), io.StringIO()
    run(greet, stdout=out, stderr=err, prefix="{rank}<{stream}>", env={"GREETING": "hello"})
    assert sorted(out.getvalue().splitlines()) == [f"{n}<stdout>rank {n} speaks hello" for n in (0, 1)]
    assert "1<stderr>rank 1 is done" in err.getvalue().splitlines()
    assert "all 2 tasks have registered" in err.getvalue()


def test_all_connections_can_be_encrypted() -> None:
    assert run(protection, encrypt=True, stderr=io.StringIO()) == ["secret", "secret"]


class Noting(LocalCluster):
    """Notes the tickets."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        self.tickets = list(tickets)
        super().request(tickets, events)


def test_tasks_first_come_to_the_address_and_ports_that_a_firewall_lets_in() -> None:
    cluster, port = Noting(1), free_port("127.0.0.1")
    options = RunOptions(1, stderr=io.StringIO(), driver_address="localhost", driver_port=port)
    assert run_function(cluster, sizes, (2,), {}, options) == [(0, 0, 1, 2.0)]
    (ticket,) = cluster.tickets
    assert ticket.addresses[0] == f"tcp:localhost:{port}"
    assert all(address.endswith(f":{port}") for address in ticket.addresses)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port + 1))
        taken.listen()
        with pytest.raises(UsageError, match=rf"{port + 1}: Address already in use; end the process"):
            run_function(cluster, sizes, (2,), {}, options)
    for wrong in (-1, 65535, 4000.5):
        with pytest.raises(UsageError, match="driver_port="):
            run(sizes, 1, driver_port=wrong)


@pytest.mark.slow
def test_results_may_be_large() -> None:
    assert [len(result) for result in run(big, 3_000_000, stdout=io.StringIO(), stderr=io.StringIO())] == [
        3_000_000
    ] * 2


def test_the_first_failure_ends_the_others_and_is_what_the_caller_gets() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .*LookupError: no such thing") as caught:
        run(one_fails, stdout=io.StringIO(), stderr=io.StringIO())
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    assert "one_fails" in caught.value.traceback_text
    assert caught.value.last_lines[-1] == "LookupError: no such thing"
    assert caught.value.host


@pytest.mark.slow
def test_an_elastic_job_ends_when_its_workers_fail_too_often(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"LookupError: attempt 2") as caught:
        run(
            fails_again,
            tmp_path / "attempts",
            min_num_proc=1,
            reset_limit=1,
            stdout=io.StringIO(),
            stderr=io.StringIO(),
        )
    assert caught.value.rank == 1
    assert (tmp_path / "attempts").read_text() == "xx"


@pytest.mark.slow
def test_workers_of_an_elastic_job_go_on_when_a_task_loses_its_agent(tmp_path: Path) -> None:
    messages = io.StringIO()
    found = run(goes_on, tmp_path, min_num_proc=1, stdout=io.StringIO(), stderr=messages)
    assert found == [(0, 2, 1), (1, 2, 0)], messages.getvalue()
    assert "1 worker goes on in place" in messages.getvalue()


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 .*SIGKILL") as caught:
        run(dies_on, 0, stdout=io.StringIO(), stderr=io.StringIO())
    assert (caught.value.rank, caught.value.exit_code) == (0, -signal.SIGKILL)


@pytest.mark.slow
def test_the_exit_code_of_a_worker_that_ends_after_those_that_lost_it() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .* failed with exit code 3") as caught:
        run(exits_late, 3, stdout=io.StringIO(), stderr=io.StringIO())
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)


class LateCluster(LocalCluster):
    """A platform that has not yet noticed which slots are taken."""

    def capacity(self) -> Capacity:
        return Capacity(1, 1)


@pytest.mark.slow
def test_too_few_slots_are_an_error_with_numbers() -> None:
    options = RunOptions(2, start_timeout=2, stdout=io.StringIO(), stderr=io.StringIO())
    with pytest.raises(TimeoutError, match=r"registered 1 of 2 .*this machine has 1 slots, 0 of them free"):
        run_function(LateCluster(1), sizes, (1,), {}, options)


class SilentCluster(LocalCluster):
    """A platform that starts no task, and does not answer when the job asks for its slots."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        pass

    def capacity(self) -> Capacity:
        raise UsageError("the platform does not answer at 10.0.0.1:80")


@pytest.mark.slow
def test_a_platform_that_does_not_answer_is_named_and_nothing_else() -> None:
    errors = io.StringIO()
    options = RunOptions(2, start_timeout=2, stderr=errors)
    with pytest.raises(TimeoutError, match=r"registered 0 of 2 .*does not answer at 10\.0\.0\.1:80"):
        run_function(SilentCluster(1), sizes, (1,), {}, options)
    assert "Traceback" not in errors.getvalue()


class EndedCluster(SilentCluster):
    """A platform whose client in this process has ended."""

    def capacity(self) -> Capacity:
        raise ConnectionRefusedError


@pytest.mark.slow
def test_a_client_of_the_platform_that_has_ended_prints_no_traceback() -> None:
    """Pytest would report an exception of the thread that asks."""
    options = RunOptions(2, start_timeout=2)
    with pytest.raises(TimeoutError, match=r"registered 0 of 2 within 2 s: ask for fewer workers"):
        run_function(EndedCluster(1), sizes, (1,), {}, options)


class CancellingCluster(LocalCluster):
    """A platform that has no room for the second task, and is told to end the first one, which still runs."""

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        super().request(tickets[:1], events)
        threading.Timer(1, events.slot_ended, (0, "cancelled by its user")).start()


def test_a_task_that_is_cancelled_before_the_job_has_begun_ends_it() -> None:
    options = RunOptions(2, stdout=io.StringIO(), stderr=io.StringIO())
    with pytest.raises(WorkerError, match="task 0: cancelled by its user"):
        run_function(CancellingCluster(1), sizes, (1,), {}, options)


def test_what_cannot_be_sent_is_an_error_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="cannot be sent to workers"):
        run(sizes, threading.Lock())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"env": {"N": 5}}, "variable N has type int: expected an ordinary string"),
        ({"env": {"N": "1\0"}}, "variable N has a null byte"),
        ({"env": {"A=B": ""}}, "variable 'A=B': expected a name without '='"),
        ({"workers": "2"}, "num_proc='2' is invalid: expected an integer"),
        ({"workers": 2.0}, "num_proc=2.0 is invalid: expected an integer"),
        ({"workers": 0}, "num_proc=0 is invalid: expected a whole number above 0"),
        ({"min_num_proc": "1"}, "min_num_proc='1' is invalid"),
        ({"stdout": "out.txt"}, "stdout='out.txt' takes no text"),
        ({"stderr": io.BytesIO()}, "takes no text: expected a file that is open for text"),
    ],
)
def test_options_of_wrong_types_are_errors_before_anything_starts(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        run(sizes, 2, **options)


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(UsageError, match="5 cannot be called"):
        run(5)


def test_a_start_timeout_is_a_number_above_0_and_the_largest_counts() -> None:
    assert RunOptions(1).start_timeout_ns == 600 * SECOND
    assert RunOptions(1, start_timeout=2.5, elastic_timeout=2).start_timeout_ns == 2_500_000_000
    for wrong in (0, -1, "5", float("inf")):
        with pytest.raises(UsageError, match=r"start_timeout=.* is invalid"):
            RunOptions(1, start_timeout=wrong)  # type: ignore[arg-type]


def test_a_worker_that_exits_has_no_result() -> None:
    with pytest.raises(WorkerError, match="rank 0 ended without a result") as caught:
        run(exits, 0, workers=1, stdout=io.StringIO(), stderr=io.StringIO())
    assert caught.value.rank == 0


def test_modules_of_the_launcher_do_not_hide_those_of_the_user() -> None:
    ((folders, words),) = run(module_path, workers=1, stdout=io.StringIO(), stderr=io.StringIO())
    assert not [folder for folder in folders if (Path(folder) / "callable_worker.py").exists()]
    assert len(words) == 1


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkerError, match=r"did not start: .* No such file or directory: /no/python"):
        run(sizes, 1, workers=1, executable="/no/python", stdout=io.StringIO(), stderr=io.StringIO())


@pytest.mark.slow
def test_two_jobs_at_once_in_threads() -> None:
    results: dict[int, list[Any]] = {}

    def job(number: int) -> None:
        results[number] = run(sizes, number, stdout=io.StringIO(), stderr=io.StringIO())

    threads = [threading.Thread(target=job, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [(0, 0, 2, 2.0 * n), (1, 1, 2, 2.0 * n)] for n in (1, 2)}
