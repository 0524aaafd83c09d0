"""Groups of dense tensors: one name for all of them, so they complete together or not at all.

The engine takes tensors on the CPU as they are, and those of other devices as copies in main memory, in one group. Each
rank must have them on devices of the same types: the name of the group's device is "cpu", "cuda", or, for several
types, all of them in order ("cpu+cuda"), which ranks compare. If a backend carries all tensors on their device, the
engine takes them one by one, under the group's name, a dot and the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde.engine import engine
from ronde.engine.process_sets import ProcessSet
from ronde.torch.handles import Group, Handle, copied
from ronde.torch.on_device import is_carried, start_on_device
from ronde.types import Kind, ReduceOp, Sum

__all__ = ["places_of", "staged_group", "start_group"]


def start_group(
    kind: Kind,
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    op: ReduceOp = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    in_place: bool = False,
    waits: bool = False,
    process_set: ProcessSet | None = None,
    places: str | None = None,
) -> Handle:
    """Submit tensors as one group (see Engine.submit_group); waiting returns the list of results.

    `in_place`: write the results of an all-reduce into the tensors. `places`: the devices of the user's whole group, if
    `tensors` are a part of it.
    """
    terms = op, prescale, postscale
    device = places_of(tensors) if places is None else places
    is_elsewhere = [not tensor.is_cpu for tensor in tensors]
    how: dict[str, Any] = dict(op=op, process_set=process_set)
    if tensors and all(tensor.is_cuda and is_carried(kind, tensor, **how) for tensor in tensors):
        how |= dict(in_place=in_place, prescale=prescale, postscale=postscale)
        names = [None if name is None else f"{name}.{index}" for index in range(len(tensors))]
        return Group(
            [start_on_device(kind, tensor, name=each, **how) for tensor, each in zip(tensors, names)]
        )
    if any(is_elsewhere):
        return staged_group(kind, tensors, is_elsewhere, name, *terms, in_place, waits, process_set, device)
    outs = tensors if in_place else None
    return engine(process_set).submit_group(kind, tensors, name, *terms, outs, waits, device)


def staged_group(
    kind: Kind,
    tensors: Sequence[Any],
    is_staged: Sequence[bool],
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    in_place: bool,
    waits: bool,
    process_set: ProcessSet | None,
    device: str,
) -> Handle:
    """Submit copies of some tensors in main memory, and the others; waiting copies results to the tensors' devices."""
    pairs = list(zip(tensors, is_staged, strict=True))
    sent = [copied(tensor.detach()) if staged else tensor for tensor, staged in pairs]
    outs = None
    if kind is Kind.allreduce:  # only this operation uses a copy, so the result may overwrite it
        outs = [copy if staged or in_place else None for copy, (_, staged) in zip(sent, pairs)]
    handle = engine(process_set).submit_group(kind, sent, name, op, prescale, postscale, outs, waits, device)
    return _MovedGroup(handle, pairs, in_place)


def places_of(tensors: Sequence[Any]) -> str:
    """Return the device type of the tensors, or of each tensor if they differ; a sparse tensor counts as "sparse"."""
    places = ["sparse" if tensor.is_sparse else tensor.device.type for tensor in tensors]
    return places[0] if len(set(places)) == 1 else "+".join(places) or "cpu"


class _MovedGroup:
    """A group whose results go to the devices of the tensors: into the tensors themselves, or new ones."""

    def __init__(self, handle: Handle, pairs: Sequence[tuple[Any, bool]], in_place: bool) -> None:
        self._handle = handle
        self._pairs = pairs  # the tensors, and whether they are staged
        self._in_place = in_place
        self._results: list[Any] | None = None

    def wait(self) -> list[Any]:
        if self._results is None:
            results = self._handle.wait()
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
