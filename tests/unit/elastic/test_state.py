"""States: what a commit keeps, and training in one process without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import ronde
import ronde.elastic
from ronde.elastic import HostsUpdatedInterrupt, ObjectState
from ronde.elastic.state import copy_into
from ronde.errors import PeerLostError, UsageError


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    ronde.shutdown()


def test_copies_keep_the_memory_of_arrays() -> None:
    array = np.arange(3.0)
    first = copy_into(None, {"w": array, "history": [1, [2]], "b": {"c": array}})
    array += 1
    memory = first["w"].ctypes.data
    second = copy_into(first, {"w": array, "history": [3], "b": {"c": array}})
    assert second is first
    assert second["w"].ctypes.data == memory
    assert (second["w"].tolist(), second["history"]) == ([1, 2, 3], [3])
    assert copy_into(array, np.arange(4)).tolist() == [0, 1, 2, 3], "another shape is another array"
    same = copy_into(array, array)
    assert same is not array


def test_a_restored_array_keeps_its_other_names() -> None:
    ronde.init()
    state = ObjectState(weights=np.zeros(2), best=1.0, log=[1])
    weights, log = state.weights, state.log
    state.commit()
    weights += 5
    state.best, state.log = 2.0, [1, 2]
    state.restore()
    assert state.weights is weights
    assert weights.tolist() == [0, 0]
    assert (state.best, state.log, log) == (1.0, [1], [1])


def test_the_attributes_of_a_state_are_not_its_methods() -> None:
    with pytest.raises(UsageError, match="a method 'commit'"):
        ObjectState(commit=1)


def test_one_process_trains_without_a_launcher() -> None:
    seen: list[int] = []

    @ronde.elastic.run
    def train(state: ObjectState, factor: int) -> str:
        """Add up."""
        for batch in state.batches(10, global_batch=4, epochs=2):
            state.total += factor * int(batch.sum())
            seen.extend(batch.tolist())
            state.commit()
        return "done"

    state = ObjectState(total=0)
    assert train(state, factor=2) == "done"
    assert (train.__name__, train.__doc__) == ("train", "Add up.")
    assert (state.total, sorted(seen)) == (4 * 45, sorted([*range(10)] * 2))
    assert ronde.elastic.goodput().steps >= 6
    assert state.commit_number == 6


def test_without_an_agent_a_loss_is_an_error() -> None:
    @ronde.elastic.run
    def train(state: ObjectState) -> None:
        raise PeerLostError("rank 1 is gone")

    with pytest.raises(PeerLostError):
        train(ObjectState())


def test_a_change_waits_for_the_commit_and_loses_nothing() -> None:
    """`on_hosts_updated` is what Horovod's launchers call."""
    resets: list[int] = []

    @ronde.elastic.run
    def train(state: ObjectState) -> int:
        for _ in state.batches(6, global_batch=2):
            state.count += 1
            if state.count == 2 and not resets:
                thread = threading.Thread(target=state.on_hosts_updated, args=(1.0, 2))
                thread.start()
                thread.join()
            state.commit()
        return int(state.count)

    state = ObjectState(count=0)
    state.register_reset_callbacks([lambda: resets.append(state.count)])
    assert train(state) == 3
    assert resets == [2], "the step was kept"


def test_check_host_updates_commits_before_a_change() -> None:
    ronde.init()
    state = ObjectState(count=0)
    state.commit()
    state.check_host_updates()
    state.count = 4
    state.on_hosts_updated()
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.count = 9
    state.restore()
    assert state.count == 4


def test_a_loop_over_batches_in_a_loop_over_epochs_is_a_mistake() -> None:
    """Its second round would have no batch."""

    @ronde.elastic.run
    def train(state: ronde.elastic.ObjectState) -> None:
        for _ in range(2):
            for _batch in state.batches(8, 4):
                state.commit()

    with pytest.raises(ronde.UsageError, match=r"a second time: let batches\(\) count the epochs"):
        train(ronde.elastic.ObjectState())
