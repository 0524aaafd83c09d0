"""Every store is linearizable: the answers to concurrent clients are those of some sequence of calls."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.linearizability import Event, check, exercise, history
from tests.conformance.store_kinds import ONLY_BOOTSTRAP, WHOLE_KINDS
from tests.conformance.store_processes import Where, start_recorder

from ronde.stores.store import Store

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


@pytest.mark.slow
def test_processes_see_one_store_although_some_are_killed(kind: str, where: Where, tmp_path: Path) -> None:
    if kind in ONLY_BOOTSTRAP:
        pytest.skip("has no queues")
    chance = random.Random(11)
    processes = [
        start_recorder(where, f"process {number}", tmp_path / f"events {number}") for number in range(4)
    ]
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
