"""Tensors that a backend reduces in the memory of their CUDA device (ronde/backends/nccl.py).

The engine's native side cannot access that memory. So PyTorch applies factors, and the average of integers, before the
tensor is submitted and after it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ronde.engine import engine
from ronde.torch.call import Call
from ronde.types import Average, DType, Kind, ReduceOp, Sum

__all__ = ["CompletedHandle", "is_carried", "start_on_device"]


class CompletedHandle:
    """A handle whose result PyTorch completes, on the stream of the first thread that waits."""

    def __init__(self, handle: Any, finish: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._finish = finish
        self._finishing = threading.RLock()
        self._result: Any = None

    @property
    def received_splits(self) -> Sequence[int]:
        splits: Sequence[int] = self._handle.received_splits
        return splits

    def wait(self) -> Any:
        reduced = self._handle.wait()
        with self._finishing:
            if self._result is None:
                self._result = self._finish(reduced)
        return self._result

    def done(self) -> bool:
        return bool(self._handle.done())


def is_carried(call: Call, tensor: Any) -> bool:
    """Return whether a backend takes the tensor in place; the same on all ranks."""
    dtype = DType.__members__.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout is not torch.strided:
        return False
    op = _carried(tensor, call.op)
    return engine(call.process_set).carries(call.kind, dtype, op, tensor.device)


def start_on_device(call: Call, tensor: Any) -> CompletedHandle:
    """Submit the tensor without a copy in main memory; return its handle."""
    from ronde.backends.nccl import make_ready

    kind, _, _, op, prescale, postscale, in_place, *_ = call
    given = tensor.detach().resolve_conj().resolve_neg().contiguous()
    x = given.to(_working_type(tensor, op, prescale != 1.0 or postscale != 1.0))
    if prescale != 1.0:
        x = _scaled(x, prescale)
    keeps_shape = kind is Kind.allreduce or kind is Kind.broadcast
    result = None
    if keeps_shape:
        is_ours = x.data_ptr() != tensor.data_ptr()
        # A broadcast runs in the memory of its input. So does an all-reduce if the program does not need the input.
        result = x if in_place or is_ours else (torch.empty_like(x) if kind is Kind.allreduce else x.clone())
        x = result if kind is Kind.broadcast else x
    make_ready(*([x] if result is None or result is x else [x, result]))
    unscaled = call._replace(op=_carried(tensor, op), prescale=1.0, postscale=1.0)
    handle = unscaled.submit(x, result, f"{tensor.device.type} memory")

    final: list[Any] = []

    def finish(reduced: Any) -> Any:
        # It may run again after an interrupt, so `reduced`, which may be the tensor, stays until `final` is set.
        if not final:
            value = reduced
            if op is Average and not _divides(tensor):
                value = torch.div(value, engine(call.process_set).size, rounding_mode="trunc")
            if postscale != 1.0:
                value = _scaled(value, postscale)
            final.append(value.to(tensor.dtype))
        if not in_place:
            return final[0]
        if final[0].data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(final[0])
        return tensor

    return CompletedHandle(handle, finish)


def _carried(tensor: Any, op: ReduceOp) -> ReduceOp:
    return Sum if op is Average and not _divides(tensor) else op


def _divides(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _working_type(tensor: Any, op: ReduceOp, is_scaled: bool) -> Any:
    """Return the type in which a reduction neither wraps around nor rounds early, as in the engine."""
    if tensor.dtype in (torch.float16, torch.bfloat16) and is_scaled:
        return torch.float32
    return torch.int64 if op is Average and not _divides(tensor) else tensor.dtype


def _scaled(tensor: Any, factor: float) -> Any:
    if _divides(tensor):
        return tensor * factor
    return tensor.clone() if tensor.dtype is torch.bool else scaled_integers(tensor, factor)


def scaled_integers(tensor: Any, factor: float) -> Any:
    """Scale as the engine does, except for products with fractions from 2**53 on, which are those of float64."""
    factor = float(factor)
    if factor.is_integer():
        modulus = 1 << 64  # products wrap around, and so may the factor
        return tensor * ((int(factor) + modulus // 2) % modulus - modulus // 2)
    return (tensor.double() * factor).to(tensor.dtype)
