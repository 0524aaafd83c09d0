"""Copies of modules, optimizers and schedulers in host memory, and what they are restored to."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ronde.torch.elastic.host_copy import StateDictPart  # noqa: E402 (needs PyTorch)


def trained() -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()


def values(state: Any) -> list[Any]:
    """Return copies of all tensors and numbers of a state."""
    if isinstance(state, torch.Tensor):
        return [state.clone()]
    if isinstance(state, dict):
        return [each for value in state.values() for each in values(value)]
    if isinstance(state, list):
        return [each for value in state for each in values(value)]
    return [state]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("steps", [0, 2])
def test_restored_states_are_those_of_the_copy(steps: int) -> None:
    """Also that of an optimizer that had none, and after a change of its options."""
    model, optimizer = trained()
    parts = [StateDictPart(each) for each in (model, optimizer)]
    for _ in range(steps):
        step(model, optimizer)
    for part in parts:
        part.save()
    saved = [values(each.state_dict()) for each in (model, optimizer)]
    for _ in range(2):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5
        for part in parts:
            part.restore()
        assert all(map(same, saved, (values(each.state_dict()) for each in (model, optimizer))))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_is_used_again_and_tensors_keep_their_identity() -> None:
    model, optimizer = trained()
    step(model, optimizer)
    part = StateDictPart(optimizer)
    part.save()
    addresses = [tensor.data_ptr() for tensor in part._copy.tensors]
    moment = optimizer.state[model[0].weight]["exp_avg"]
    step(model, optimizer)
    part.restore()
    part.save()
    assert [tensor.data_ptr() for tensor in part._copy.tensors] == addresses
    assert optimizer.state[model[0].weight]["exp_avg"] is moment
    assert moment.data_ptr() not in addresses


def test_a_new_process_takes_over_a_payload() -> None:
    model, optimizer = trained()
    model.to(torch.bfloat16)
    step_of = StateDictPart(model), StateDictPart(optimizer)
    for part in step_of:
        part.save()
    other = trained()
    other[0].to(torch.bfloat16)
    for part, value in zip(step_of, other):
        StateDictPart(value).load(part.payload())
    assert same(values(model.state_dict()), values(other[0].state_dict()))
    part = StateDictPart(other[0])
    part.load(step_of[0].payload())
    before = values(part._copy.tensors)
    with torch.no_grad():
        other[0][0].weight.add_(1)
    assert same(before, values(part._copy.tensors))  # the live state has other memory


def test_schedulers_are_restored() -> None:
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    parts = [StateDictPart(each) for each in (optimizer, schedule)]
    for part in parts:
        part.save()
    step(model, optimizer)
    schedule.step()
    for part in parts:
        part.restore()
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_part_without_a_copy_restores_nothing() -> None:
    model, _ = trained()
    before = values(model.state_dict())
    StateDictPart(model).restore()
    assert same(before, values(model.state_dict()))


class Counting(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A module with a state that is neither a parameter nor a buffer."""

    count = 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


def test_the_extra_state_of_modules_is_restored() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Counting())
    part = StateDictPart(model)
    model[1].count = 1
    part.save()
    model[1].count = 2
    part.restore()
    assert model[1].count == 1
