"""Copies of states in host memory: of a module, an optimizer, or anything with `state_dict` and `load_state_dict`.

1. There is one copy. The next one goes into the same memory, unless the shape of a tensor has changed.
2. Tensors on a CUDA device are copied into pinned memory by the current stream, without a wait of this thread. Kernels
   that change a tensor later run after its copy, as they do on the same stream. This thread waits before it reads.
3. Restoring writes into the tensors that the program has, so that references to them, such as those of a compiled
   step, stay right. The copy never becomes part of the live state.
4. Of a tensor that is sharded (DTensor), each rank copies its own part.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from ronde.torch.outline import TensorSlot, fill, outline_of

__all__ = ["HostCopy", "StateDictPart"]

_ALIGNMENT_BYTES = 16  # of the largest element


class HostCopy:
    """A copy of a nested value with tensors, whose memory the next copy reuses."""

    def __init__(self) -> None:
        self.outline: Any = None
        self.tensors: list[Any] = []  # in host memory, by the position of the slot
        self._copied: list[Any] = []  # CUDA events

    def take(self, value: Any) -> None:
        """Copy the value."""
        live: list[Any] = []
        self.outline = copy.deepcopy(outline_of(value, live))
        parts = [local_part(tensor) for tensor in live]
        self.tensors = self._fitting(parts)
        _copy_all(self.tensors, parts, is_blocking=False)
        self._copied = _events(parts)

    def put_into(self, tensors: Sequence[Any]) -> None:
        """Copy the values into these tensors, one for each slot."""
        _copy_all([local_part(tensor) for tensor in tensors], self.tensors, is_blocking=True)

    def wait(self) -> None:
        """Wait until the copies of tensors on devices are complete."""
        copied, self._copied = self._copied, []
        for event in copied:
            event.synchronize()

    def _fitting(self, parts: Sequence[Any]) -> list[Any]:
        """Return memory for each tensor: that of the last copy where it fits."""
        before: list[Any] = self.tensors + [None] * (len(parts) - len(self.tensors))
        return [
            memory if memory is not None and _fits(memory, part) else _host_memory(part)
            for memory, part in zip(before, parts)
        ]


class StateDictPart:
    """The part of an elastic state that is one object's `state_dict()`.

    `is_sharded`: whether this rank has a part of it only, as with FSDP2.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._copy = HostCopy()
        live: list[Any] = []
        outline_of(value.state_dict(), live)
        # An optimizer has no state before its first step, but it has parameters.
        self.is_sharded = any(_is_sharded(tensor) for tensor in (*live, *parameters_of(value)))

    def save(self) -> None:
        """Copy the state to host memory."""
        self._copy.take(self.value.state_dict())

    def restore(self) -> None:
        """Make the last copy the object's state. Gradients of its parameters are cleared."""
        if self._copy.outline is None:
            return
        self._copy.wait()
        live: list[Any] = []
        state = self.value.state_dict()
        outline = outline_of(state, live)
        clear_gradients(self.value)
        if _same(outline, self._copy.outline):
            self._copy.put_into(live)
            if isinstance(self.value, torch.nn.Module | torch.optim.Optimizer) and not _has_extra(state):
                return
        self.value.load_state_dict(_like(state, self._filled(outline, live)))
        if isinstance(self.value, torch.optim.Optimizer):
            _shard_like_parameters(self.value)

    def payload(self) -> Any:
        """Return the last copy: its outline, and shape and bytes of each tensor, in an array that shares its memory."""
        self._copy.wait()
        return self._copy.outline, [(tuple(each.shape), _bytes_of(each)) for each in self._copy.tensors]

    def load(self, payload: Any) -> None:
        """Take over another rank's copy, as this rank's copy and as live state."""
        outline, received = payload
        slots: list[TensorSlot] = []
        fill(outline, slots.append)
        self._copy = HostCopy()
        self._copy.outline = outline
        self._copy.tensors = [
            _tensor_of(slot.dtype, shape, array) for slot, (shape, array) in zip(slots, received)
        ]
        self.restore()

    def _filled(self, outline: Any, live: Sequence[Any]) -> Any:
        """Return the copied value: in the object's own tensors where it has them, else in new ones."""
        there: dict[tuple[Any, ...], Any] = {}
        _find_slots(outline, (), live, there)

        def fill_at(saved: Any, path: tuple[Any, ...]) -> Any:
            match saved:
                case TensorSlot():
                    memory = self._copy.tensors[saved.position]
                    own = there.get(path)
                    if own is None or local_part(own).shape != memory.shape or own.dtype != memory.dtype:
                        return memory.clone()
                    with torch.no_grad():
                        local_part(own).copy_(memory)
                    return own
                case dict():
                    return {key: fill_at(each, (*path, key)) for key, each in saved.items()}
                case list():
                    return [fill_at(each, (*path, i)) for i, each in enumerate(saved)]
                case tuple() if type(saved) is tuple:
                    return tuple(fill_at(each, (*path, i)) for i, each in enumerate(saved))
            return copy.deepcopy(saved)

        return fill_at(self._copy.outline, ())


def clear_gradients(value: Any) -> None:
    """Remove the gradients of a module or optimizer: they belong to a step that does not count any more."""
    for parameter in parameters_of(value):
        parameter.grad = None


def parameters_of(value: Any) -> list[Any]:
    """Return the parameters of a module or optimizer; none of another object."""
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _shard_like_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Make state that a new process has received, local parts of tensors, sharded as its parameters are."""
    for parameter, state in optimizer.state.items():
        if not hasattr(parameter, "to_local"):
            continue
        local: Any = parameter.to_local()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "to_local") and value.dim():
                if value.shape == local.shape:
                    state[name] = type(parameter.data).from_local(
                        value.to(local.device),
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )


def local_part(tensor: Any) -> Any:
    """Return the memory that this rank has of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _has_extra(state: Any) -> bool:
    """Return whether the state of a module has tensors that are not those of the module (`get_extra_state`)."""
    return any(str(name).endswith("_extra_state") for name in state)


def _is_sharded(tensor: Any) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _find_slots(outline: Any, path: tuple[Any, ...], tensors: Sequence[Any], found: dict[Any, Any]) -> None:
    match outline:
        case TensorSlot():
            found[path] = tensors[outline.position]
        case dict():
            for key, each in outline.items():
                _find_slots(each, (*path, key), tensors, found)
        case list() | tuple():
            for i, each in enumerate(outline):
                _find_slots(each, (*path, i), tensors, found)


def _same(one: Any, other: Any) -> bool:
    """Return whether two outlines are equal; False also where their values cannot be compared."""
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _like(state: Any, filled: Any) -> Any:
    """Return the filled value with the versions of modules that a module's state carries."""
    if not isinstance(state, OrderedDict):
        return filled
    ordered: Any = OrderedDict(filled)
    if hasattr(state, "_metadata"):
        ordered._metadata = state._metadata
    return ordered


def _fits(memory: Any, tensor: Any) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    kinds = [(each.shape, each.dtype, each.layout) for each in (memory, tensor)]
    return kinds[0] == kinds[1] and memory.is_pinned() == tensor.is_cuda


def _host_memory(tensor: Any) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.cpu().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy_all(into: Sequence[Any], tensors: Sequence[Any], is_blocking: bool) -> None:
    with torch.no_grad():
        _copy_without_graph(into, tensors, is_blocking)


def _copy_without_graph(into: Sequence[Any], tensors: Sequence[Any], is_blocking: bool) -> None:
    there = [(one, other) for one, other in zip(into, tensors) if not one.is_cuda and not other.is_cuda]
    strided = [pair for pair in there if pair[0].layout is torch.strided and not pair[0].is_quantized]
    if strided:
        torch._foreach_copy_([one for one, _ in strided], [other for _, other in strided])
    for one, other in zip(into, tensors):
        if one.is_cuda or other.is_cuda or one.layout is not torch.strided or one.is_quantized:
            one.copy_(other, non_blocking=not is_blocking)


def _events(tensors: Sequence[Any]) -> list[Any]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def _bytes_of(tensor: Any) -> Any:
    """Return a strided tensor as bytes in the same memory, others as they are."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _tensor_of(dtype: Any, shape: Sequence[int], received: Any) -> Any:
    if isinstance(received, torch.Tensor):
        return received
    if received.size == 0:  # a shard may have no element
        return torch.empty(shape, dtype=dtype)
    if not received.flags.writeable or received.ctypes.data % _ALIGNMENT_BYTES:
        received = received.copy()
    return torch.from_numpy(received).view(dtype).reshape(shape)
