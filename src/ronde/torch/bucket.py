"""Collects small gradients into one buffer, which is reduced at once.

A separate collective for each of a thousand biases would cost more than all their bytes. Gradients that are neighbours
in symmetric memory are one tensor of the engine, submitted when the last of them has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ronde.torch.gradient import InPlace, SymmetricGradient

__all__ = ["Bucket", "make_buckets"]

_SMALL_BYTES = 64 * 1024  # larger gradients go alone
_BUCKET_BYTES = 2**20  # a limit, so that the first of many small gradients does not wait for the last


class Bucket:
    """Neighbouring gradients. The bucket is the handle of each of them."""

    def __init__(self, members: Sequence[SymmetricGradient]) -> None:
        self._members = members
        self._missing = len(members)
        first, last = members[0], members[-1]
        begin, end = first.place.offset, last.place.offset + last.place.gradient.nbytes
        memory = first.place.memory[begin:end].view(first.place.gradient.dtype)
        self._tensor = InPlace(memory, f"{first.name} to {last.name}", first.treatment)
        self._handle: Any = None
        for member in members:
            member.bucket = self

    def count_arrival(self) -> None:
        """Count a gradient that has arrived. With the last one, move all into their places and submit the bucket."""
        self._missing -= 1
        if self._missing == 0:
            self._move_gradients()
            self._handle = self._tensor.submit()

    def _move_gradients(self) -> None:
        """Copy the gradients in one call, because a call for each costs more than the bytes."""
        moved, gradients, places = [], [], []
        for member in self._members:
            gradient, place = member.parameter.grad, member.place.gradient
            if gradient is place:
                continue
            if gradient is None or gradient.is_sparse or gradient.requires_grad:
                member.move_or_submit()
                continue
            moved.append(member)
            gradients.append(gradient)
            places.append(place)
        if moved:
            torch._foreach_copy_(places, gradients)
        for member, place in zip(moved, places):
            member.parameter.grad = place

    def expect_all(self) -> None:
        """Expect all gradients of a new step."""
        self._missing, self._handle = len(self._members), None

    def wait(self) -> Any:
        """Wait until all gradients are reduced, if the bucket has been submitted."""
        return None if self._handle is None else self._handle.wait()

    def done(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._handle is None or self._handle.done())


def make_buckets(gradients: Sequence[SymmetricGradient]) -> list[Bucket]:
    """Return buckets of small gradients that are neighbours, at least two in each."""
    runs: list[list[SymmetricGradient]] = []
    small = [each for each in gradients if each.place.gradient.nbytes <= _SMALL_BYTES]
    for each in sorted(small, key=lambda each: each.place.offset):
        if runs and _continues(runs[-1], each):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [Bucket(run) for run in runs if len(run) > 1]


def _continues(run: Sequence[SymmetricGradient], each: SymmetricGradient) -> bool:
    first, last = run[0].place, run[-1].place
    return (
        each.place.offset == last.end
        and each.place.gradient.dtype == last.gradient.dtype
        and each.place.offset - first.offset < _BUCKET_BYTES
    )
