"""One parameter's gradient on its way: seen by a hook, submitted, waited for.

The hook runs once per parameter and step, in the middle of the backward pass, so it does nothing twice that can be
done once before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ronde.engine import engine
from ronde.torch.compression import Compressor
from ronde.torch.differentiable import Reduction
from ronde.torch.handles import Group, Handle, start
from ronde.torch.sparse import start_sparse
from ronde.torch.symmetric import Place
from ronde.types import Average, Kind, Sum

__all__ = ["Gradient", "SymmetricGradient", "Together", "Treatment"]

# By parameter: the hook of its latest optimizer. A parameter that gets a new one leaves the old, which may still live.
_hooks: Any = WeakTensorKeyDictionary()


class Treatment:
    """What all gradients of an optimizer have in common."""

    def __init__(
        self, reduction: Reduction, compression: Compressor, passes: int, sparse_as_dense: bool
    ) -> None:
        self.reduction = reduction
        self.compression = compression
        self.passes = passes
        self.sparse_as_dense = sparse_as_dense
        self.begun: list[Gradient] = []  # those that this step's backward passes have come to


class Gradient:
    """A gradient that autograd allocates: reduced where it lies, or compressed."""

    __slots__ = ("group", "handle", "left", "name", "parameter", "sparse_dims", "treatment")

    def __init__(self, parameter: Any, name: str, treatment: Treatment) -> None:
        self.parameter = parameter
        self.name = name
        self.treatment = treatment
        self.group: Together | None = None
        self.left = treatment.passes  # how many backward passes are to come in this step
        self.handle: Handle | None = None
        self.sparse_dims = 0  # of the latest gradient, if it was sparse

    def follow(self) -> Any:
        """Hear of every gradient of the parameter; return what ends this when its `remove()` is called."""
        earlier = _hooks.get(self.parameter)
        if earlier is not None:
            earlier.remove()
        hook = self.parameter.register_post_accumulate_grad_hook(self.arrived)
        _hooks[self.parameter] = hook
        return hook

    def arrived(self, _: Any) -> None:
        """Called when a backward pass has accumulated the gradient."""
        left = self.left
        if left == 0:
            raise AssertionError(
                f"{self.name} got more gradients than backward_passes_per_step={self.treatment.passes} before "
                "step() or synchronize(); raise it to accumulate gradients"
            )
        if left == self.treatment.passes:
            self.treatment.begun.append(self)
        self.left = left - 1
        if left == 1:
            if self.group is None:
                self.send()
            else:
                self.group.arrived()

    def send(self) -> None:
        """Submit the gradient as it is now; if there is none, zeros."""
        gradient = self.parameter.grad
        if gradient is None:
            gradient = self.parameter.grad = self._zeros()
        if gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {self.name} is part of a graph: create_graph=True is not supported"
            )
        if not gradient.is_sparse:
            self.handle = self._reduce(gradient, gradient.copy_)
            return
        self.sparse_dims = gradient.sparse_dim()
        if self.treatment.sparse_as_dense:
            self.handle = self._reduce(gradient.to_dense(), self._replace_by_sparse)
        else:
            self.handle = self._gather(gradient)

    def _zeros(self) -> Any:
        parameter, dims = self.parameter, self.sparse_dims
        if not dims:
            return torch.zeros_like(parameter)
        positions = torch.empty(dims, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            positions, parameter.new_empty(0, *parameter.shape[dims:]), parameter.shape
        )

    def _reduce(self, gradient: Any, use: Any) -> Handle:
        """Reduce a dense gradient in place, or compressed; then `use` is called with it."""
        compression = self.treatment.compression
        op, prescale, postscale = self.treatment.reduction
        sent, context = compression.compress(gradient)
        handle = start(
            Kind.allreduce, sent, in_place=True, name=self.name, op=op, prescale=prescale, postscale=postscale
        )
        if sent is self.parameter.grad:
            return handle
        return Group([handle], lambda results: use(compression.decompress(results[0], context)))

    def _gather(self, gradient: Any) -> Handle:
        """Reduce a sparse gradient: gather what all ranks have, and add up what has the same position."""
        op, prescale, postscale = self.treatment.reduction
        if op not in (Sum, Average):
            raise ValueError(
                f"sparse gradients cannot be reduced with op={op.name}; sparse_as_dense=True can"
            )
        handle = start_sparse(gradient, name=self.name, op=op, prescale=prescale, postscale=postscale)
        return Group([handle], lambda results: self._replace(results[0]))

    def _replace(self, gradient: Any) -> None:
        self.parameter.grad = gradient

    def _replace_by_sparse(self, gradient: Any) -> None:
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # PyTorch makes them itself
            self.parameter.grad = gradient.to_sparse(self.sparse_dims)


class InPlace:
    """A tensor that is reduced in place again and again."""

    def __init__(self, tensor: Any, name: str, reduction: Reduction) -> None:
        self._tensor, self._name, self._reduction = tensor, name, reduction
        self._prepare()

    def _prepare(self) -> None:
        self._engine = engine()
        self._submit = self._engine.prepare(self._tensor, self._name, *self._reduction)

    def submit(self) -> Handle:
        """Submit it as it is now."""
        if self._engine is not engine():  # shut down, and initialized again
            self._prepare()
        return self._submit(False)


class Bucketed(Protocol):
    """What a gradient tells that it is in its place (bucket.Bucket), instead of being submitted by itself."""

    def filled(self) -> None: ...
    def wait(self) -> Any: ...
    def done(self) -> bool: ...


class SymmetricGradient(Gradient):
    """A gradient that lives in symmetric memory.

    Autograd accumulates into it where it finds it. But after `zero_grad()` it finds none, and hands over its own: that
    is copied, while it is still in the processor's cache, and let go at once. This costs less than to clear the
    gradient and to add to it, and less than new memory for all gradients in every step.
    """

    __slots__ = ("_mine", "_tensor", "bucket", "place")

    def __init__(self, parameter: Any, name: str, treatment: Treatment, place: Place) -> None:
        super().__init__(parameter, name, treatment)
        self.place = place
        self.bucket: Bucketed | None = None
        self._mine = place.gradient
        self._tensor: InPlace | None = None

    def send(self) -> None:
        parameter, mine = self.parameter, self._mine
        gradient = parameter.grad
        if gradient is not mine:
            if gradient is None and not self.sparse_dims:
                mine.zero_()
            elif gradient is None or gradient.is_sparse or gradient.requires_grad:
                super().send()
                if self.bucket is not None:
                    self.bucket.filled()  # with what nobody is going to read
                return
            else:
                mine.copy_(gradient)
            parameter.grad = mine
        if self.bucket is not None:
            self.handle = self.bucket
            self.bucket.filled()
            return
        if self._tensor is None:
            self._tensor = InPlace(self.place.sent, self.name, self.treatment.reduction)
        self.handle = self._tensor.submit()


class Together:
    """Gradients that are submitted when all of them are there."""

    def __init__(self, members: Sequence[Gradient]) -> None:
        self._members = members
        self._missing = len(members)
        for member in members:
            member.group = self

    def arrived(self) -> None:
        """One of them is there."""
        self._missing -= 1
        if self._missing == 0:
            for member in self._members:
                member.send()

    def begin(self) -> None:
        """Wait for all of them again."""
        self._missing = len(self._members)
