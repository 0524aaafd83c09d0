"""PyTorch programs whose ranks die and come: optimizers, samplers, DDP and process groups follow.

The test plays their agent (`tests/ranks/elastic/agent.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ranks.elastic.agent import Agent

import ronde
from ronde.testing import ranks

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

TRAINING = str(Path(__file__).parent / "training.py")


def run_until_size(agent: Agent, size: int) -> None:
    """Wait until all members are in a world of this size."""

    def is_there() -> bool:
        last = {line.worker: line.value["size"] for line in agent.lines if "size" in line.value}
        return len(agent.members) == size and all(last.get(each) == size for each in agent.members)

    agent.run(is_there)
    assert agent.workers, "the training ended too early"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "size"),
    [("optimizer", "", 3), ("ronde", "before", 2), ("ronde", "within", 2), ("gloo", "before", 2)],
)
def test_a_loss_and_a_return(how: str, where: str, size: int, tmp_path: Path) -> None:
    """All ranks end with the same state, survivors in their processes; each sample counts once in each epoch."""
    stop = tmp_path / "stop"
    with Agent([TRAINING, how, where, str(stop)], size, environment={"RONDE_LOG_LEVEL": "error"}) as agent:
        run_until_size(agent, size)
        agent.kill(0)  # that has the state by Horovod's rule
        run_until_size(agent, size - 1)
        agent.add()
        run_until_size(agent, size)
        stop.touch()
        agent.run()
        results = {line.worker: line.value for line in agent.lines if "done" in line.value}
        assert sorted(results) == list(range(1, size + 1))
        assert (
            len({str((each["weights"], each["moments"], each["epochs"])) for each in results.values()}) == 1
        )
        assert all(results[each]["pid"] == agent.of(each)[0]["pid"] for each in range(1, size))
        for epoch in results[1]["epochs"]:
            assert set(epoch) == set(range(48))
            assert len(epoch) <= 48 + 2  # the sampler deals the first samples again to make the parts even
        assert sum(len(epoch) == 48 for epoch in results[1]["epochs"]) >= len(results[1]["epochs"]) - 2


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_a_loss_while_the_group_is_made_again(dying: int, tmp_path: Path) -> None:
    """Gloo waits for the lost rank, which serves the store or does not; a new process comes to the round after."""
    stop = tmp_path / "stop"
    program = [TRAINING, "gloo", "before", str(stop), str(dying)]
    with Agent(program, 4, environment={"RONDE_LOG_LEVEL": "error"}) as agent:
        run_until_size(agent, 4)
        agent.kill(3)
        run_until_size(agent, 2)
        agent.add()
        run_until_size(agent, 3)
        stop.touch()
        agent.run()
        results = {line.worker: line.value for line in agent.lines if "done" in line.value}
        assert len(results) == 3
        assert len({str((each["weights"], each["moments"])) for each in results.values()}) == 1


# One world


def horovods_state() -> None:
    """Synchronized, changed, restored and committed: the scenario of Horovod's own test."""
    hvd.init()
    torch.set_num_threads(1)
    value = 1.0 if hvd.rank() == 0 else 2.0
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
    state = hvd.elastic.TorchState(model, optimizer, batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    state.sync()
    assert all((parameter == 1).all() for parameter in state.model.parameters())
    assert (state.batch, state.epoch) == (20, 10)

    model.load_state_dict(other.state_dict())
    state.batch, state.epoch = 21, 11
    state.restore()
    assert all((parameter == 1).all() for parameter in model.parameters())
    assert (state.batch, state.epoch) == (20, 10)

    hvd.broadcast_parameters(other.state_dict())
    model.load_state_dict(other.state_dict())
    state.batch, state.epoch = 21, 11
    state.commit()
    state.batch = 22
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert all(torch.equal(one, another) for one, another in zip(model.parameters(), other.parameters()))
    assert (state.batch, state.epoch) == (21, 11)
    hvd.shutdown()


def horovods_sampler() -> None:
    """What all ranks have processed by a commit is known to all; the rest is dealt after a synchronization."""
    hvd.init()
    dataset = range(8 * hvd.size())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(sampler=sampler, optimizer=None)
    state.sync()
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state.commit()
    sampler.record_batch(2, 2)
    sampler.record_batch(3, 2)
    state.restore()
    assert sampler.processed_num == len(sampler.processed_indices) == 4 * hvd.size()
    sampler.record_batch(0, 2)  # the rest is dealt anew
    state.commit()
    state.sync()
    assert len(sampler) == 2
    of_ranks = hvd.allgather_object((sampler.processed_indices, sampler.indices))
    assert all(processed == of_ranks[0][0] for processed, _ in of_ranks)
    left = [index for _, indices in of_ranks for index in indices]
    assert sorted([*left, *of_ranks[0][0]]) == list(dataset)
    sampler.set_epoch(1)
    assert len(sampler) == 8
    hvd.shutdown()


def objects_of_the_state() -> None:
    """Another object may take the place of one; what has no state is refused; reset callbacks run."""
    hvd.init()
    model = torch.nn.Linear(2, 2)
    state = hvd.elastic.TorchState(model, epoch=0)
    state.sync()
    state.model = other = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(other.state_dict())
    state.commit()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other
    assert (other.weight != 0).any()
    with pytest.raises(TypeError):
        state.model = 3
    calls: list[int] = []
    state.register_reset_callbacks([lambda: calls.append(1)])
    state.on_reset()
    assert calls == [1]
    assert not isinstance(hvd.elastic.HostsUpdatedInterrupt(), ronde.PeerError)
    hvd.shutdown()


def programs() -> None:
    for program in (horovods_state, horovods_sampler, objects_of_the_state):
        program()


@pytest.mark.parametrize("n", [1, 2])
def test_states_in_one_world(n: int) -> None:
    ranks.run(programs, n)
