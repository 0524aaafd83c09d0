"""The gradients of an optimizer: hooks notice them and submit them alone, in a group, or in a bucket.

A hook runs once per parameter and step, in the middle of the backward pass, so as much as possible is prepared before.

A `GradientGroup` is the user's: its gradients are submitted as one operation when all of them have arrived.

Gradients of parameters on the CPU live in symmetric memory, where all ranks of a host reduce them in place. One buffer
holds them in the order in which backward passes compute them: the last parameters first. A `Bucket` is a run of small
neighbours there, which are one tensor of the engine: a separate collective for each of a thousand biases would cost
more than all their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ronde.comm.world import world
from ronde.engine import engine
from ronde.torch.call import Call
from ronde.torch.compression import Compressor
from ronde.torch.handles import Group, Handle
from ronde.torch.tensors import start_tensor, start_tensors
from ronde.types import Average, Sum

__all__ = [
    "Bucket",
    "Gradient",
    "GradientGroup",
    "GradientMemory",
    "SymmetricGradient",
    "Treatment",
    "make_buckets",
    "make_groups",
    "private_places",
    "symmetric_places",
]

Use = Callable[[Any], object]

_SMALL_BYTES = 64 * 1024  # larger gradients go alone
_BUCKET_BYTES = 2**20  # a limit, so that the first of many small gradients does not wait for the last
_ALIGNMENT_BYTES = 64  # a cache line: neighbours are reduced by different ranks

# By parameter: the hook of its latest optimizer. An older optimizer that is still alive loses its hook.
_hooks: Any = WeakTensorKeyDictionary()


class Treatment:
    """The properties that all gradients of an optimizer share."""

    def __init__(
        self,
        call: Call,
        compression: Compressor,
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        """`call`: an all-reduce in place, still without a name."""
        self.call = call
        self.compression = compression
        self.passes = passes
        self.sparse_as_dense = sparse_as_dense
        self.begun: list[Gradient] = []  # gradients of this step so far

    def submit_gradient(self, name: str, sent: Any) -> Handle[Any]:
        """Submit a gradient in place. A gathered sparse gradient replaces the old one without a copy."""
        return start_tensor(self.call._replace(name=name, in_place=not sent.is_sparse), sent)


class Gradient:
    """A gradient in memory of autograd, reduced in place or compressed."""

    __slots__ = ("group", "handle", "name", "parameter", "passes_left", "sparse_dims", "treatment")

    def __init__(self, parameter: Any, name: str, treatment: Treatment) -> None:
        self.parameter = parameter
        self.name = name
        self.treatment = treatment
        self.group: GradientGroup | None = None
        self.passes_left = treatment.passes  # backward passes still expected in this step
        self.handle: Handle[Any] | None = None
        self.sparse_dims = 0  # of the latest gradient, if it was sparse

    def register_hook(self) -> Any:
        """Register the hook for the parameter's gradients; return it. Its `remove()` ends it."""
        earlier = _hooks.get(self.parameter)
        if earlier is not None:
            earlier.remove()
        hook = self.parameter.register_post_accumulate_grad_hook(self.on_accumulated)
        _hooks[self.parameter] = hook
        return hook

    def on_accumulated(self, _: Any) -> None:
        """Count a backward pass that has accumulated the gradient; submit the gradient after the last one."""
        left = self.passes_left
        if left == 0:
            raise AssertionError(
                f"{self.name} got more gradients than backward_passes_per_step={self.treatment.passes} before "
                "step() or synchronize(); raise it to accumulate gradients; if another model's pass went through "
                "this one (as in a GAN), freeze this one during that pass by requires_grad_(False)"
            )
        if left == self.treatment.passes:
            self.treatment.begun.append(self)
        self.passes_left = left - 1
        if left == 1:
            if self.group is None:
                self.submit_now()
            else:
                self.group.count_arrival()

    def submit_now(self) -> None:
        """Submit the present gradient, or zeros if there is none."""
        sent, use = self.prepare_to_send()
        handle = self.treatment.submit_gradient(self.name, sent)
        self.handle = handle if use is None else Group([handle], lambda results: use(results[0]))

    def prepare_to_send(self) -> tuple[Any, Use | None]:
        """Return the tensor to reduce in place, and a function to call with the result, or None."""
        gradient = self.parameter.grad
        if gradient is None:
            gradient = self.parameter.grad = self._zeros()
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {self.name} is part of a graph: create_graph=True is not supported"
            )
        use: Use = gradient.copy_
        if gradient.is_sparse:
            self.sparse_dims = gradient.sparse_dim()
            if not self.treatment.sparse_as_dense:
                self._check_sparse()
                return gradient, self._set_gradient
            gradient, use = gradient.to_dense(), self._set_sparse_gradient
        compression = self.treatment.compression
        sent, context = compression.compress(gradient)
        if sent is self.parameter.grad:
            return sent, None
        return sent, lambda result: use(compression.decompress(result, context))

    def _zeros(self) -> Any:
        parameter, dims = self.parameter, self.sparse_dims
        if not dims:
            return torch.zeros_like(parameter)
        positions = torch.empty(dims, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            positions, parameter.new_empty(0, *parameter.shape[dims:]), parameter.shape
        )

    def _check_sparse(self) -> None:
        op = self.treatment.call.op
        if op not in (Sum, Average):
            raise ValueError(
                f"sparse gradients cannot be reduced with op={op.name}; sparse_as_dense=True can"
            )

    def _set_gradient(self, gradient: Any) -> None:
        self.parameter.grad = gradient

    def _set_sparse_gradient(self, gradient: Any) -> None:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # PyTorch creates them
            self.parameter.grad = gradient.to_sparse(self.sparse_dims)


# Groups


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


# Gradients in symmetric memory


class GradientMemory(NamedTuple):
    """Memory for a gradient: `gradient` has the parameter's layout, `sent` is the same memory, contiguous.

    `memory` is the whole buffer as bytes, in which the gradient begins at `offset` and the next one at `end`.
    """

    gradient: Any
    sent: Any
    memory: Any
    offset: int
    end: int


def symmetric_places(parameters: Sequence[Any]) -> list[GradientMemory | None]:
    """Return memory for each parameter's gradient; None for those that are not real floats on the CPU.

    All ranks call it with parameters of the same shapes and dtypes; otherwise it raises MismatchError.
    """
    return _places(parameters, lambda nbytes: torch.from_numpy(world().empty(nbytes, np.uint8)))


def private_places(parameters: Sequence[Any]) -> list[GradientMemory | None]:
    """Return memory as `symmetric_places` does, that other processes do not share."""
    return _places(parameters, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def _places(parameters: Sequence[Any], memory_of: Callable[[int], Any]) -> list[GradientMemory | None]:
    offsets, end = [], 0
    for parameter in reversed(parameters):
        offsets.append(end)
        if _is_placeable(parameter):
            end += _padded(parameter.nbytes)
    memory = memory_of(end)
    return [
        _place(parameter, memory, offset) if _is_placeable(parameter) else None
        for parameter, offset in zip(parameters, reversed(offsets))
    ]


def _is_placeable(parameter: Any) -> bool:
    return bool(parameter.is_cpu and parameter.is_floating_point() and parameter.layout is torch.strided)


def _place(parameter: Any, memory: Any, offset: int) -> GradientMemory:
    flat = memory[offset : offset + parameter.nbytes].view(parameter.dtype)
    # The strides that autograd gives a gradient: the parameter's if it is dense, otherwise those of a contiguous
    # tensor.
    strides = torch.empty_like(parameter, device="meta").stride()
    gradient = flat.as_strided(parameter.shape, strides)
    sent = gradient if gradient.is_contiguous() else flat
    return GradientMemory(gradient, sent, memory, offset, offset + _padded(parameter.nbytes))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class InPlace:
    """A tensor that is reduced in place repeatedly."""

    def __init__(self, tensor: Any, name: str, treatment: Treatment) -> None:
        self._tensor, self._name, self._treatment = tensor, name, treatment
        self._prepare()

    def _prepare(self) -> None:
        call = self._treatment.call
        self._engine = engine(call.process_set)
        self._submit = self._engine.prepare(self._tensor, self._name, call.op, call.prescale, call.postscale)

    def submit(self) -> Handle[Any]:
        """Submit the present values of the tensor."""
        if self._engine is not engine(self._treatment.call.process_set):  # shut down, and initialized again
            self._prepare()
        return self._submit(False)


class SymmetricGradient(Gradient):
    """A gradient that lives in symmetric memory.

    Autograd accumulates into an existing gradient. After `zero_grad()` there is none, and autograd allocates one, which
    is copied while it is still in the processor's cache, and freed then. This costs less than clearing the gradient
    and adding to it, and less than new memory for all gradients in every step. Those of a bucket move together.
    """

    __slots__ = ("_mine", "_tensor", "bucket", "place")

    def __init__(self, parameter: Any, name: str, treatment: Treatment, place: GradientMemory) -> None:
        super().__init__(parameter, name, treatment)
        self.place = place
        self.bucket: Bucket | None = None
        self._mine = place.gradient
        self._tensor: InPlace | None = None

    def submit_now(self) -> None:
        if self.bucket is not None:
            self.handle = self.bucket
            self.bucket.count_arrival()
        elif not self._move_into_place():
            super().submit_now()
        else:
            if self._tensor is None:
                self._tensor = InPlace(self.place.sent, self.name, self.treatment)
            self.handle = self._tensor.submit()

    def move_or_submit(self) -> None:
        """Move into its place or, if the gradient cannot be there, submit it alone in this step.

        The bucket sends the place in any case. Of a gradient that went alone it holds values that no rank reads.
        """
        if not self._move_into_place():
            super().submit_now()

    def prepare_to_send(self) -> tuple[Any, Use | None]:
        return (self.place.sent, None) if self._move_into_place() else super().prepare_to_send()

    def _move_into_place(self) -> bool:
        """Move the gradient into its place if it can be there; return whether it can."""
        parameter, mine = self.parameter, self._mine
        gradient = parameter.grad
        if gradient is mine:
            return True
        if gradient is None and not self.sparse_dims:
            mine.zero_()
        elif gradient is None or gradient.is_sparse or gradient.requires_grad:
            return False
        else:
            mine.copy_(gradient)
        parameter.grad = mine
        return True


# Buckets


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
