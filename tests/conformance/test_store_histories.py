"""Every store is linearizable: the answers to concurrent clients are those of some sequence of calls."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.store_kinds import ONLY_BOOTSTRAP, ROOT, WHOLE_KINDS, Where

from ronde.net.stores.base import Store
from ronde.testing.linearizability import Event, Recorder, check, exercise, history, random_calls

# It has no queues, cannot tell an absent key from an empty value, and does not expect deletions while it reads.
NOT_OF_TORCH = ["queue_push", "queue_pop", "queue_len", "compare_set", "delete_key"]


@pytest.fixture(scope="module", params=[*WHOLE_KINDS, "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("seed", range(2))
def test_threads_see_one_store(kind: str, connect: Callable[[], Store], seed: int) -> None:
    without = NOT_OF_TORCH if kind in ONLY_BOOTSTRAP else []
    check(exercise([connect() for _ in range(4)], seed, calls=40, without=without))


def test_threads_that_share_a_client_see_one_store(kind: str, store: Store) -> None:
    without = NOT_OF_TORCH if kind in ONLY_BOOTSTRAP else []
    check(exercise([store] * 3, 7, calls=40, without=without))


def test_processes_see_one_store_although_some_are_killed(kind: str, where: Where, tmp_path: Path) -> None:
    if kind in ONLY_BOOTSTRAP:
        pytest.skip("has no queues")
    chance = random.Random(11)
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(4):
        command = [sys.executable, "-m", "tests.conformance.test_store_histories"]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT))
        stdin = processes[-1].stdin
        assert stdin
        pickle.dump((where, f"process {number}", str(tmp_path / f"events {number}")), stdin)
        stdin.close()
    for number in range(4):
        while not (tmp_path / f"events {number}").exists():
            time.sleep(0.01)
    for process in processes[:2]:
        time.sleep(chance.uniform(0.05, 0.2))
        process.kill()
    for process in processes:
        process.wait()
    assert [process.returncode for process in processes[2:]] == [0, 0]
    operations = history(event for number in range(4) for event in read(tmp_path / f"events {number}"))
    assert len(operations) > 150
    check(operations)


def read(path: Path) -> list[Event]:
    """Return the calls that a process reported before it was killed, perhaps in the middle of a report."""
    events = []
    with path.open("rb") as file:
        while True:
            try:
                events.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return events


def make_calls() -> None:
    """Be such a process."""
    where, name, path = pickle.load(sys.stdin.buffer)
    store = where.open()
    with open(path, "wb", buffering=0) as file:
        recorder = Recorder(store, name, lambda event: file.write(pickle.dumps(event)))
        random_calls(recorder, name, 80)
    store.close()


if __name__ == "__main__":
    make_calls()
