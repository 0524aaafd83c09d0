"""One parameter's gradient: a hook notices it, submits it, and the optimizer waits for it.

The hook runs once per parameter and step, in the middle of the backward pass, so as much as possible is prepared
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ronde.engine import engine
from ronde.torch.call import Call
from ronde.torch.compression import Compressor
from ronde.torch.handles import Group, Handle
from ronde.torch.reductions import start_tensor
from ronde.torch.symmetric import GradientMemory
from ronde.types import Average, Sum

__all__ = ["Gradient", "InPlace", "SymmetricGradient", "Treatment"]

Use = Callable[[Any], object]

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


class Grouped(Protocol):
    """A group of gradients, submitted instead of each of them (gradient_groups.GradientGroup)."""

    def count_arrival(self) -> None: ...
    def submit_now(self) -> None: ...


class Gradient:
    """A gradient in memory of autograd, reduced in place or compressed."""

    __slots__ = ("group", "handle", "name", "parameter", "passes_left", "sparse_dims", "treatment")

    def __init__(self, parameter: Any, name: str, treatment: Treatment) -> None:
        self.parameter = parameter
        self.name = name
        self.treatment = treatment
        self.group: Grouped | None = None
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


class Bucketed(Protocol):
    """A bucket of gradients, moved and submitted instead of each of them (bucket.Bucket)."""

    def count_arrival(self) -> None: ...
    def wait(self) -> Any: ...
    def done(self) -> bool: ...


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
        self.bucket: Bucketed | None = None
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
