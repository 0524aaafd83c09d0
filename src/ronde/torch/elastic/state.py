"""`TorchState`: the state of a training in PyTorch, as `ronde.elastic` commits, restores and synchronizes it."""

from __future__ import annotations

from typing import Any

import torch

from ronde.elastic import ObjectState
from ronde.torch.elastic import process_groups
from ronde.torch.elastic.host_copy import StateDictPart
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.optimizer import follow_new_world

__all__ = ["TorchState"]


class SamplerPart:
    """The part of a state that is an `ElasticSampler`."""

    is_sharded = False
    may_differ = True  # ranks describe the same processed samples differently

    def __init__(self, name: str, value: ElasticSampler) -> None:
        self.name, self.value = name, value
        self._saved = value.state_dict()

    def exchange(self) -> None:
        """Learn what the other ranks have recorded. All ranks call it."""
        self.value.exchange(self.name)

    def save(self) -> None:
        """Copy the sampler's state."""
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        """Make the copy the sampler's state, in the present world."""
        self.value.load_state_dict(self._saved)

    def payload(self) -> Any:
        """Return the copy."""
        return self._saved

    def load(self, payload: Any) -> None:
        """Take over another rank's copy."""
        self._saved = payload
        self.restore()


Part = StateDictPart | SamplerPart


class TorchState(ObjectState):
    """The state of a training: models, optimizers, schedulers, samplers, and numbers such as the epoch.

        state = hvd.elastic.TorchState(model, optimizer, schedule=schedule, sampler=sampler, epoch=0, batch=0)

    Each argument becomes an attribute. What has a `state_dict` and a `load_state_dict` is committed and restored by
    these, in host memory that is used again for the next commit; other values are copied as objects.

    Args:
        model: A module, or None.
        optimizer: An optimizer, of `DistributedOptimizer` also, or None.
        named: Further modules, optimizers, learning rate schedulers, samplers and values, by the names of attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **named: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **named}
        self._held: dict[str, Part] = {}
        held = {name: part for name, value in given.items() if (part := _part_of(name, value)) is not None}
        super().__init__(**{name: value for name, value in given.items() if name not in held})
        for name, part in held.items():
            self.add_part(name, part)
            setattr(self, name, part.value)
        self._held = held

    def __setattr__(self, name: str, value: Any) -> None:
        held: dict[str, Part] = self.__dict__.get("_held", {})
        if name in held:
            part = _part_of(name, value)
            if part is None:
                raise TypeError(
                    f"state.{name} needs a state_dict and a load_state_dict, which {value!r} lacks"
                )
            part.save()
            held[name] = part
            self.add_part(name, part)
        super().__setattr__(name, value)

    def commit(self) -> None:
        """Commit, as `ronde.elastic.State.commit`. Samplers exchange first which samples are processed."""
        self._exchange()
        super().commit()

    def check_host_updates(self) -> None:
        """Check, as `ronde.elastic.State.check_host_updates`; samplers exchange first which samples are processed."""
        self._exchange()
        super().check_host_updates()

    def reset(self) -> None:
        """Prepare what the program holds for the present world: optimizers, samplers, and modules of DDP."""
        super().reset()
        follow_new_world()
        for part in self._held.values():
            if isinstance(part, SamplerPart):
                part.value.reset()
            elif isinstance(part.value, torch.nn.Module):
                _give_new_group(part.value)

    def sync(self) -> None:
        """Give all ranks the same state; samplers deal the samples that are left to the ranks of the present world."""
        super().sync()
        for part in self._held.values():
            if isinstance(part, SamplerPart):
                part.value.reset()

    def prepare_save(self) -> None:
        """Let samplers exchange which samples are processed."""
        super().prepare_save()
        self._exchange()

    def _exchange(self) -> None:
        for part in self._held.values():
            if isinstance(part, SamplerPart):
                part.exchange()


def _part_of(name: str, value: Any) -> Part | None:
    if isinstance(value, ElasticSampler):
        return SamplerPart(name, value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateDictPart(value)
    return None


def _give_new_group(module: torch.nn.Module) -> None:
    """Give a DDP module in it the default group of the present round, if that group was made again."""
    if not process_groups.has_default_group():
        return
    for each in module.modules():
        if isinstance(each, torch.nn.parallel.DistributedDataParallel):
            each._update_process_group(torch.distributed.group.WORLD)
