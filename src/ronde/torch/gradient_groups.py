"""Groups of gradients, submitted as one operation when all of them have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ronde.torch.gradient import Gradient
from ronde.torch.handles import Group
from ronde.torch.reductions import start_tensors

__all__ = ["GradientGroup", "make_groups"]


class GradientGroup:
    """Several gradients with one handle."""

    def __init__(self, members: Sequence[Gradient]) -> None:
        self._members = members
        self._missing = len(members)
        self._name = f"{members[0].name} and {len(members) - 1} more"
        for member in members:
            member.group = self

    def count_arrival(self) -> None:
        """Count a gradient that has arrived; submit the group with the last one."""
        self._missing -= 1
        if self._missing == 0:
            self.submit_now()

    def expect_all(self) -> None:
        """Expect all gradients of a new step."""
        self._missing = len(self._members)

    def submit_now(self) -> None:
        """Submit the present gradients, unless they are submitted already."""
        if self._members[0].handle is not None:
            return
        tensors, uses = zip(*(member.prepare_to_send() for member in self._members))
        call = self._members[0].treatment.call._replace(name=self._name, is_group=True)
        finished = Group([start_tensors(call, tensors)], lambda results: _use(results[0], uses))
        for member in self._members:
            member.handle = finished


def _use(results: Iterable[Any], uses: Iterable[Callable[[Any], object] | None]) -> None:
    for result, use in zip(results, uses):
        if use is not None:
            use(result)


def make_groups(
    gradients: Sequence[Gradient], parameters: Iterable[Any], groups: int | Sequence[Sequence[Any]] | None
) -> list[GradientGroup]:
    """Return the groups: for a number, that many groups of neighbours; for lists of parameters, theirs; else no groups.

    `parameters`: all of the optimizer; the lists may contain those without a gradient. Raises ValueError if `groups` is
    neither a number nor lists of parameters, and for a parameter in two groups or of another optimizer.
    """
    if groups is None or (isinstance(groups, int) and groups == 0):
        return []
    members = (
        _neighbours(gradients, groups) if isinstance(groups, int) else _listed(gradients, parameters, groups)
    )
    return [GradientGroup(group) for group in members if len(group) > 1]


def _neighbours(gradients: Sequence[Gradient], count: int) -> list[Sequence[Gradient]]:
    if count < 0:
        raise ValueError(f"groups must be a positive number or lists of parameters, not {count}")
    bounds = [len(gradients) * i // count for i in range(count + 1)]
    return [gradients[begin:end] for begin, end in zip(bounds, bounds[1:])]


def _listed(
    gradients: Sequence[Gradient], parameters: Iterable[Any], groups: Sequence[Sequence[Any]]
) -> list[Sequence[Gradient]]:
    own = {id(parameter) for parameter in parameters}
    by_parameter = {id(gradient.parameter): gradient for gradient in gradients}
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        if isinstance(group, torch.Tensor | str):
            raise ValueError("groups must be a positive number or lists of parameters")
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must be a positive number or lists of parameters")
            what = f"a parameter of shape {tuple(parameter.shape)} in groups[{number}]"
            if id(parameter) in group_of:
                raise ValueError(
                    f"{what} is in groups[{group_of[id(parameter)]}], too; a parameter can be in one group only"
                )
            if id(parameter) not in own:
                raise ValueError(f"{what} is not one of the optimizer's")
            group_of[id(parameter)] = number
    return [[by_parameter[id(each)] for each in group if id(each) in by_parameter] for group in groups]
