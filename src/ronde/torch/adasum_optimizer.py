"""An optimizer that combines the changes of each rank's own step by Adasum.

With an optimizer that has a state, Adasum of gradients would lose its effect: momentum and Adam's scaling mix the steps
of many batches. So each rank first makes a step with its own gradients and state. Then the parameters become their old
values plus the Adasum of all ranks' changes. Horovod does the same. Maleki et al., "Scaling Distributed Training with
Adaptive Summation", MLSys 2021.

Nothing is sent before `step`, so programs may clip, unscale or change gradients until then, and every optimizer works,
also one with a closure. The ranks combine the changes of the first parameters while later ones are still computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from ronde.engine.process import ProcessSet
from ronde.torch.call import Call
from ronde.torch.compression import Compressor
from ronde.torch.handles import Group, Handle, start_dense, wait_all
from ronde.torch.names import named_by_parameter, names_of, parameters_of, tensor_name
from ronde.types import Adasum, Allreduce

__all__ = ["DistributedAdasum"]


class DistributedAdasum:
    """The class in front of the optimizer's own; `DistributedOptimizer(op=Adasum)` makes it."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, Any]] | None,
        compression: Compressor,
        passes: int,
        process_set: ProcessSet | None,
    ) -> None:
        self._names = names_of(parameters_of(self), named_parameters)
        self._number = 0
        self._compression = compression
        self._passes = passes
        self._process_set = process_set
        self._memory: dict[int, Any] = {}  # by the parameter's identity: memory of its size

    @property
    def _parameter_names(self) -> dict[Any, str]:
        """The names by parameter, under Horovod's attribute, which programs read."""
        return named_by_parameter(parameters_of(self), self._names)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients add up before `step()`. The program counts them."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes between two steps."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
        self._passes = passes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks must add the same."""
        super().add_param_group(param_group)  # type: ignore[misc]
        for name, parameter in parameters_of(self).items():
            self._names.setdefault(id(parameter), name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make this rank's own step, combine its changes with those of the other ranks, and apply the result.

        If the ranks disagree, or one is lost, the parameters keep their values; the optimizer's state has changed.
        """
        parameters = [each for each in parameters_of(self).values() if each.requires_grad]
        befores = [parameter.data for parameter in parameters]
        try:
            for parameter, before in zip(parameters, befores):
                parameter.data = self._memory_for(parameter).copy_(before)
            loss = super().step(closure)  # type: ignore[misc]
            afters = [parameter.data for parameter in parameters]
        finally:
            for parameter, before in zip(parameters, befores):
                parameter.data = before
        handles = []
        for parameter, before, after in zip(parameters, befores, afters):
            change = torch.sub(after, before, out=self._memory_for(parameter))
            handles.append(self._combine(tensor_name(self, parameter), change))
        for before, change in zip(befores, wait_all(handles)):
            before.add_(change)
        return loss

    # The optimizer's own `step` calls hooks and the profiler; this keeps PyTorch from wrapping `step` a second time.
    step.hooked = True  # type: ignore[attr-defined]

    def _memory_for(self, parameter: Any) -> Any:
        memory = self._memory.get(id(parameter))
        if memory is None or not _is_alike(memory, parameter):
            memory = self._memory[id(parameter)] = torch.empty_like(parameter.data)
        return memory

    def _combine(self, name: str, change: Any) -> Handle[Any]:
        """Submit a change; the handle returns the Adasum of all ranks' changes."""
        compression = self._compression
        sent, context = compression.compress(torch.view_as_real(change) if change.is_complex() else change)
        handle = start_dense(Call(Allreduce, name, self._process_set, Adasum, in_place=True), sent)

        def finish(results: list[Any]) -> Any:
            result = compression.decompress(results[0], context)
            return torch.view_as_complex(result) if change.is_complex() else result

        return Group([handle], finish)

    def synchronize(self) -> None:
        """Do nothing: `step()` combines changes, and each rank keeps its own gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: every step combines the changes of all ranks."""
        raise AssertionError(
            "with op=Adasum gradients are not reduced before step(), so there is nothing to skip: change them between "
            "backward() and step()"
        )


def _is_alike(memory: Any, parameter: Any) -> bool:
    """Return whether the memory still fits the parameter, which the program may have converted or moved."""
    kind = memory.shape, memory.dtype, memory.device, memory.stride()
    return kind == (parameter.shape, parameter.dtype, parameter.device, parameter.stride())
