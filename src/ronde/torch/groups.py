"""Groups of dense tensors: one name for all of them, so they complete together or not at all.

The engine takes tensors on the CPU as they are, and those of other devices as copies in main memory, in one group. Each
rank must have them on devices of the same types: the name of the group's device is "cpu", "cuda", or, for several
types, all of them in order ("cpu+cuda"), which ranks compare. If a backend carries all tensors on their device, the
engine takes them one by one, under the group's name, a dot and the position.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ronde.torch.call import Call
from ronde.torch.handles import Group, Handle, copied
from ronde.torch.on_device import is_carried, start_on_device
from ronde.types import Kind

__all__ = ["places_of", "staged_group", "start_group"]


def start_group(call: Call, tensors: Sequence[Any], places: str | None = None) -> Handle[Any]:
    """Submit tensors as one group (see Engine.submit_group); waiting returns the list of results.

    `places`: the devices of the user's whole group, if `tensors` are a part of it.
    """
    device = places_of(tensors) if places is None else places
    is_elsewhere = [not tensor.is_cpu for tensor in tensors]
    if tensors and all(tensor.is_cuda and is_carried(call, tensor) for tensor in tensors):
        names = [None if call.name is None else f"{call.name}.{index}" for index in range(len(tensors))]
        return Group(
            [
                start_on_device(call._replace(name=name, waits=False), tensor)
                for tensor, name in zip(tensors, names)
            ]
        )
    if any(is_elsewhere):
        return staged_group(call, tensors, is_elsewhere, device)
    return call.submit_group(tensors, tensors if call.in_place else None, device)


def staged_group(call: Call, tensors: Sequence[Any], is_staged: Sequence[bool], device: str) -> Handle[Any]:
    """Submit copies of some tensors in main memory, and the others; waiting copies results to the tensors' devices."""
    pairs = list(zip(tensors, is_staged, strict=True))
    sent = [copied(tensor.detach()) if staged else tensor for tensor, staged in pairs]
    outs = None
    if call.kind is Kind.allreduce:  # only this operation uses a copy, so the result may overwrite it
        outs = [copy if staged or call.in_place else None for copy, (_, staged) in zip(sent, pairs)]
    return _MovedGroup(call.submit_group(sent, outs, device), pairs, call.in_place)


def places_of(tensors: Sequence[Any]) -> str:
    """Return the device type of the tensors, or of each tensor if they differ; a sparse tensor counts as "sparse"."""
    places = ["sparse" if tensor.is_sparse else tensor.device.type for tensor in tensors]
    return places[0] if len(set(places)) == 1 else "+".join(places) or "cpu"


class _MovedGroup:
    """A group whose results go to the devices of the tensors: into the tensors themselves, or new ones."""

    def __init__(self, handle: Handle[Any], pairs: Sequence[tuple[Any, bool]], in_place: bool) -> None:
        self._handle = handle
        self._pairs = pairs  # the tensors, and whether they are staged
        self._in_place = in_place
        self._moving = threading.RLock()
        self._results: list[Any] | None = None

    def wait(self) -> list[Any]:
        results = self._handle.wait()
        with self._moving:
            if self._results is None:
                self._results = [
                    self._moved(tensor, result) if staged else result
                    for (tensor, staged), result in zip(self._pairs, results, strict=True)
                ]
        return self._results

    def done(self) -> bool:
        return self._handle.done()

    def _moved(self, tensor: Any, result: Any) -> Any:
        if not self._in_place:
            return result.to(tensor.device)
        tensor.detach().copy_(result)
        return tensor
