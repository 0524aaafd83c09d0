"""Optimizers that combine what all ranks have computed before, or in, each step.

`DistributedOptimizer` submits a parameter's gradient as soon as a backward pass has computed it, while the pass
continues. `synchronize`, which `step` calls, waits for all gradients. A parameter without a gradient on this rank takes
part with zeros, because it may have one on other ranks.

With `op=Adasum` it combines the changes of each rank's own step instead. With an optimizer that has a state, Adasum of
gradients would lose its effect: momentum and Adam's scaling mix the steps of many batches. So each rank first makes a
step with its own gradients and state. Then the parameters become their old values plus the Adasum of all ranks'
changes. Horovod does the same. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
Nothing is sent before `step`, so programs may clip, unscale or change gradients until then, and every optimizer works,
also one with a closure. The ranks combine the changes of the first parameters while later ones are still computed.

An optimizer outlives its world, in a process that outlives a round. It is then in the same state as that of a process
that is new in the round and cannot ask the others when it makes its optimizer: gradients have private memory, in the
same order and under the same names. The ranks agree on the parameters, and make symmetric memory, after the first step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from ronde.engine.process import ProcessSet, global_process_set
from ronde.process.membership_channel import membership
from ronde.torch.call import Call, is_member, size_of
from ronde.torch.compression import Compression, Compressor
from ronde.torch.gradients import (
    Bucket,
    Gradient,
    GradientGroup,
    GradientMemory,
    SymmetricGradient,
    Treatment,
    make_buckets,
    make_groups,
    private_places,
    symmetric_places,
)
from ronde.torch.handles import Group, Handle, wait_all
from ronde.torch.parameters import (
    agree_on_parameters,
    names_of,
    number_alone,
    parameters_of,
    tensor_name,
)
from ronde.torch.tensors import start_dense
from ronde.types import Adasum, Allreduce, Average, ReduceOp

__all__ = ["DistributedOptimizer", "follow_new_world"]

_living: weakref.WeakSet[Any] = weakref.WeakSet()  # those that reduce gradients


def DistributedOptimizer(  # noqa: N802 - Horovod's name; what it returns is an instance of a class made for it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = global_process_set,
    symmetric_gradients: bool = True,
) -> _DistributedOptimizer:
    """Return an optimizer like `optimizer`, of a subclass of its class, that reduces gradients over all ranks.

    All ranks of the process set call it, with the same parameters and arguments. It replaces `optimizer`, whose state
    and options it shares.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    Args:
        optimizer: any torch optimizer; do not use it afterwards.
        named_parameters: `model.named_parameters()`: names for all parameters of the optimizer (None: numbered). The
            names may be those of another optimizer's parameters.
        compression: hvd.Compression.fp16 or bf16 sends 16 bits per element (default: none).
        backward_passes_per_step: the number of passes that add up gradients before they are reduced (default: 1).
        op: Average, Sum, or Adasum, which combines the changes of each rank's own step (default: Average).
        gradient_predivide_factor: divides before the sum; the rest of the average follows after it (default: 1).
        num_groups: an older name of `groups`.
        groups: a number of groups, or lists of parameters, whose gradients are reduced together (None: no groups).
        sparse_as_dense: whether to reduce sparse gradients as dense ones (default: False).
        process_set: the ranks that take part (default: all); other ranks get a plain optimizer.
        symmetric_gradients: whether gradients of CPU parameters are in memory that the ranks of a host share, which
            saves copies; only without a process set (default: True).

    Raises:
        MismatchError: a parameter's name, shape or dtype differs between ranks; the error names it.
        ValueError: an argument is invalid, or names are missing or not unique.
    """
    ranks = size_of(process_set)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    _check_passes(backward_passes_per_step)
    if isinstance(optimizer, _NamedParameters):
        raise ValueError("this optimizer is distributed already")
    has_others = ranks > 1 and is_member(process_set)
    may_grow = ranks == 1 and membership() is not None
    base: type = _DistributedAdasum if op == Adasum and (has_others or may_grow) else _Distributed
    kind: Any = type(optimizer.__class__.__name__, (base, optimizer.__class__), {})
    distributed: Any = kind.__new__(kind)
    # The new object shares all attributes: state, hooks, and options that the constructor would ask for again. Except a
    # `step` that a learning rate scheduler has set on the instance: it would call the old optimizer.
    distributed.__dict__.update({name: it for name, it in optimizer.__dict__.items() if name != "step"})
    if base is _DistributedAdasum:
        distributed._distribute(named_parameters, compression, backward_passes_per_step, process_set)
        return cast("_DistributedOptimizer", distributed)
    factor = gradient_predivide_factor
    call = Call(Allreduce, None, process_set, op, 1.0 / factor, factor, in_place=True)
    treatment = Treatment(call, compression, backward_passes_per_step, sparse_as_dense)
    distributed._distribute(named_parameters, treatment, groups or num_groups, symmetric_gradients)
    if has_others:
        distributed._follow_gradients(is_alone=_others_may_have_theirs())
    return cast("_DistributedOptimizer", distributed)


def follow_new_world() -> None:
    """Prepare all optimizers of this process for the world that it has joined now. Other ranks need not take part."""
    for optimizer in list(_living):
        optimizer._follow_new_world()


def _others_may_have_theirs() -> bool:
    """Return whether other ranks may have outlived an earlier round, with the optimizers that they made there."""
    mine = membership()
    return mine is not None and mine.number > 0


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")


def _trained_parameters(optimizer: Any) -> list[Any]:
    return [parameter for parameter in parameters_of(optimizer).values() if parameter.requires_grad]


class _NamedParameters:
    """A distributed optimizer, with names by which ranks match its parameters. It precedes the optimizer's class."""

    def _name_parameters(self, named_parameters: Iterable[tuple[str, Any]] | None) -> None:
        self._names = names_of(parameters_of(self), named_parameters)
        self._number = 0

    @property
    def _parameter_names(self) -> dict[Any, str]:
        """The names by parameter, under Horovod's attribute, which programs read."""
        return {parameter: self._names[id(parameter)] for parameter in parameters_of(self).values()}


class _Distributed(_NamedParameters):
    """Reduces gradients."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, Any]] | None,
        treatment: Treatment,
        groups: int | Sequence[Sequence[Any]],
        symmetric: bool,
    ) -> None:
        self._name_parameters(named_parameters)
        self._treatment = treatment
        self._wanted_groups, self._wants_symmetric = groups, symmetric
        self._has_others = False  # whether other ranks take part
        self._is_alone = False  # whether the ranks have yet to agree on the parameters
        self._hooks: list[Any] = []  # finalizers that remove a hook each
        self._gradients: list[Gradient] = []
        self._groups: list[GradientGroup] = []
        self._buckets: list[Bucket] = []
        self._is_synchronized = False
        self._should_synchronize = True
        self._early_steps = 0  # in a row, each after fewer backward passes than expected
        if treatment.call.process_set in (None, global_process_set):
            _living.add(self)

    def _follow_gradients(self, is_alone: bool) -> None:
        """Reduce the gradients of all parameters that require one.

        `is_alone`: the ranks agree later (`_agree`), because others are not in this call.
        """
        followed = _trained_parameters(self)
        # If the order differs between ranks, names still match gradients, but symmetric memory needs one order.
        is_one_order: bool | None = True
        if is_alone:
            number_alone(self)
        else:
            is_one_order = agree_on_parameters(self, followed, self._treatment.call.process_set)
        self._has_others, self._is_alone = True, is_alone
        self._follow(followed, bool(is_one_order))

    def _follow(self, followed: Sequence[Any], is_one_order: bool) -> None:
        treatment = self._treatment
        process_set = treatment.call.process_set
        places: Sequence[GradientMemory | None] = [None] * len(followed)
        is_of_all = process_set is None or process_set is global_process_set
        if self._wants_symmetric and is_one_order and is_of_all and treatment.compression is Compression.none:
            places = (private_places if self._is_alone else symmetric_places)(followed)
        for parameter, place in zip(followed, places):
            self._add_gradient(parameter, place)
        groups = self._wanted_groups
        self._groups = make_groups(self._gradients, list(parameters_of(self).values()), groups)
        self._buckets = make_buckets(
            [each for each in self._gradients if isinstance(each, SymmetricGradient) and each.group is None]
        )
        for gradient in self._gradients:
            self._register_hook(gradient)

    def _stop_following(self) -> None:
        """Forget all gradients, also those in flight, whose operations have ended."""
        for hook in self._hooks:
            hook()  # removes it
        self._hooks, self._gradients, self._groups, self._buckets = [], [], [], []
        self._treatment.begun.clear()
        self._is_synchronized, self._has_others, self._is_alone = False, False, False

    def _follow_new_world(self) -> None:
        """Follow the gradients in the present world, as a new optimizer does in a process that is new in it."""
        self._stop_following()
        if size_of(None) > 1:
            self._follow_gradients(is_alone=True)

    def _agree(self) -> None:
        """Agree with the other ranks on the parameters, and follow the gradients in memory that the ranks share.

        All ranks call it at the end of the same step. If one has joined, they try again after the next one.
        """
        followed = _trained_parameters(self)
        is_one_order = agree_on_parameters(self, followed, self._treatment.call.process_set)
        if is_one_order is None:
            return
        self._stop_following()
        self._has_others = True
        self._follow(followed, is_one_order)

    def _add_gradient(self, parameter: Any, place: GradientMemory | None = None) -> Gradient:
        name = tensor_name(self, parameter)
        if place is None:
            gradient = Gradient(parameter, name, self._treatment)
        else:
            gradient = SymmetricGradient(parameter, name, self._treatment, place)
        self._gradients.append(gradient)
        return gradient

    def _register_hook(self, gradient: Gradient) -> None:
        """Register the gradient's hook for the lifetime of this optimizer."""
        finalizer = weakref.finalize(self, gradient.register_hook().remove)
        finalizer.atexit = False
        self._hooks.append(finalizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; all ranks must add the same. Their gradients are reduced too."""
        known = {id(parameter) for parameter in parameters_of(self).values()}
        super().add_param_group(param_group)  # type: ignore[misc]
        for name, parameter in parameters_of(self).items():
            if id(parameter) not in known:
                self._names.setdefault(id(parameter), name)
                if parameter.requires_grad and self._has_others:
                    self._register_hook(self._add_gradient(parameter))

    def _allreduce_grad_async(self, p: Any) -> tuple[Handle[Any], Any]:
        """Submit the gradient of a parameter now; return the handle, and the context that decompresses the result.

        `step()` does not need it. Programs recognize an optimizer of Horovod by this name.
        """
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        treatment = self._treatment
        dense = p.grad.to_dense() if p.grad.is_sparse and treatment.sparse_as_dense else p.grad
        sent, context = treatment.compression.compress(dense)
        return treatment.submit_gradient(tensor_name(self, p), sent), context

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients add up before they are reduced."""
        return self._treatment.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes between two steps."""
        _check_passes(passes)
        self._treatment.passes = passes
        self._begin_step()

    def _begin_step(self) -> None:
        """Expect the gradients of a new step, and forget those of the last one."""
        self._treatment.begun.clear()
        for gradient in self._gradients:
            gradient.handle = None
            gradient.passes_left = self._treatment.passes
        for group in self._groups:
            group.expect_all()
        for bucket in self._buckets:
            bucket.expect_all()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced: `parameter.grad` is then the same on all ranks.

        `step()` calls it. Call it before `step()` to read or change the gradients (to clip them, for example), and then
        call `step()` within `skip_synchronize()`.
        """
        try:
            if self._treatment.passes > 1:
                self._count_early_step()
            for gradient in self._gradients:
                if gradient.handle is None:
                    (gradient.group or gradient).submit_now()
            wait_all(
                dict.fromkeys(gradient.handle for gradient in self._gradients if gradient.handle is not None)
            )
        finally:
            self._begin_step()
        if self._is_alone:
            self._agree()
        self._is_synchronized = True

    def _count_early_step(self) -> None:
        """Warn of the second step in a row that comes before all backward passes. The last one of an epoch may."""
        begun, passes = self._treatment.begun, self._treatment.passes
        is_early = bool(begun) and all(gradient.passes_left for gradient in begun)
        self._early_steps = self._early_steps + 1 if is_early else 0
        if self._early_steps == 2:
            warnings.warn(
                f"optimizer.step() called after {passes - begun[0].passes_left} of backward_passes_per_step={passes} "
                f"backward passes, twice in a row: each step() reduces the gradients and changes the weights; call it "
                f"after every {passes} passes, or leave backward_passes_per_step out",
                stacklevel=4,
            )

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()` within the block use the gradients as they are, because they are synchronized already."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, then make the optimizer's step. With a closure, synchronize after each of its calls."""
        if not self._should_synchronize:
            reduced = closure
        elif closure is None:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): it "
                    "reduces the gradients a second time, and changes made to them in between count on every rank; "
                    "write `with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
            reduced = None
        else:
            reduced = partial(self._reduce_after, closure)
        self._is_synchronized = False
        return super().step(reduced)  # type: ignore[misc]

    # The optimizer's own `step` calls hooks and the profiler; this keeps PyTorch from wrapping `step` a second time.
    step.hooked = True  # type: ignore[attr-defined]

    def _reduce_after(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            result = closure()
        self.synchronize()
        self._is_synchronized = False
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients. Raises AssertionError between a backward pass and step() or synchronize()."""
        if self._treatment.begun:
            raise AssertionError(
                "zero_grad() was called after backward() but before step() or synchronize(), while the gradients were "
                "in flight: call synchronize() before it; if the pass was for another model (as in a GAN), freeze this "
                "one during that pass by requires_grad_(False)"
            )
        self._is_synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and begin a new step."""
        self._begin_step()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]


class _DistributedAdasum(_NamedParameters):
    """Combines the changes of each rank's own step, by Adasum."""

    def _distribute(
        self,
        named_parameters: Iterable[tuple[str, Any]] | None,
        compression: Compressor,
        passes: int,
        process_set: ProcessSet | None,
    ) -> None:
        self._name_parameters(named_parameters)
        self._compression = compression
        self._passes = passes
        self._process_set = process_set
        self._memory: dict[int, Any] = {}  # by the parameter's identity: memory of its size
        if _others_may_have_theirs():
            number_alone(self)
        else:
            agree_on_parameters(self, _trained_parameters(self), process_set)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes whose gradients add up before `step()`. The program counts them."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes between two steps."""
        _check_passes(passes)
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
        parameters = _trained_parameters(self)
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


if TYPE_CHECKING:

    class _DistributedOptimizer(_Distributed, torch.optim.Optimizer, Any):  # type: ignore[misc]
        """What `DistributedOptimizer` returns, for type checkers.

        It is also an instance of the optimizer's own class, which no annotation can say. `Any` among the bases has
        checkers accept it where that class is expected, as in `optimizer = DistributedOptimizer(optimizer)`.
        """
