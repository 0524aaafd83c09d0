"""Operations in flight: what an `_async` operation returns, and the tensors that the engine gets for it.

The engine takes tensors on the CPU as they are, with any layout. It takes a tensor of another device in place if a
backend carries it there (`on_device`). Otherwise the tensor travels through main memory: a copy there is submitted, and
the result is copied back by the thread that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from ronde.errors import UsageError
from ronde.torch.call import Call
from ronde.torch.on_device import CompletedHandle, is_carried, start_on_device
from ronde.types import Kind

__all__ = [
    "Group",
    "Handle",
    "Received",
    "check_tensors",
    "copied",
    "poll",
    "start_dense",
    "staged",
    "synchronize",
    "wait_all",
]


ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Handle(Protocol[ResultT_co]):
    """An operation that has begun. Its tensors must not change, nor be used, until it is done."""

    def wait(self) -> ResultT_co:
        """Wait for the result and return it. Raises MismatchError on all ranks if they submitted different
        operations.
        """

    def done(self) -> bool:
        """Return whether `wait` would return at once."""


def check_tensors(tensors: Iterable[Any]) -> None:
    """Raise UsageError unless all of them are tensors."""
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            raise _no_tensor(each)


def _no_tensor(given: object) -> UsageError:
    if given is None:
        return UsageError(
            "None is not a tensor: a parameter has the gradient None until its first backward pass and after "
            "zero_grad(); leave it out on all ranks, or give torch.zeros_like(parameter)"
        )
    if isinstance(given, Mapping):
        return UsageError(
            f"expected a tensor, not a {type(given).__name__}; broadcast_parameters() takes a state_dict, and "
            "broadcast_object() any object"
        )
    return UsageError(
        f"expected a tensor, not {given!r:.60}; torch.as_tensor() makes one of numbers and arrays"
    )


def start_dense(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a dense tensor to the engine. Raises UsageError unless it is one, and the errors of `Engine.submit`."""
    if not isinstance(tensor, torch.Tensor):
        raise _no_tensor(tensor)
    if tensor.is_cpu:
        return call.submit(tensor, tensor if call.in_place else None)
    if tensor.is_cuda and is_carried(call, tensor):
        return start_on_device(call, tensor)
    return staged(call, tensor)


def staged(call: Call, tensor: Any) -> Handle[Any]:
    """Submit a copy of the tensor in main memory; waiting copies the result to the tensor's device."""
    copy = copied(tensor.detach())
    # Only this operation uses the copy, so the result may overwrite it if it has the same shape.
    keeps_shape = call.kind is Kind.allreduce or call.kind is Kind.broadcast
    handle = call.submit(copy, copy if keeps_shape else None, tensor.device.type)

    def finish(result: Any) -> Any:
        if not call.in_place:
            return result.to(tensor.device)
        tensor.detach().copy_(result)
        return tensor

    return CompletedHandle(handle, finish)


def copied(tensor: Any) -> Any:
    """Return a copy in main memory; of a CUDA tensor in pinned memory, which the device accesses directly."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(tensor.device))
    there.synchronize()
    return copy


class Group:
    """Several operations as one: waiting returns the list of their results."""

    def __init__(
        self, handles: Iterable[Handle[Any]], finish: Callable[[list[Any]], Any] = lambda results: results
    ):
        self._handles = list(handles)
        self._finish = finish

    def wait(self) -> Any:
        return self._finish(wait_all(self._handles))

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)


class Received:
    """An all-to-all: waiting returns its result and how many rows came from each rank."""

    def __init__(self, handle: Any, splits: Any) -> None:
        self._handle = handle
        self._splits = splits  # as the user passed them: received splits get their type and device

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        result = self._handle.wait()
        rows = [int(count) for count in self._handle.received_splits]
        if isinstance(self._splits, torch.Tensor):
            return result, self._splits.new_tensor(rows)
        return result, torch.tensor(rows, dtype=torch.int32)

    def done(self) -> bool:
        return bool(self._handle.done())


def wait_all(handles: Iterable[Handle[Any]]) -> list[Any]:
    """Wait for all handles, even if one fails. Return their results, or raise the first failure."""
    results, failure = [], None
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def poll(handle: Handle[Any]) -> bool:
    """Return whether the operation is complete, so that `synchronize` would return or raise at once.

    Args:
        handle: returned by an `_async` operation.

    Raises no error.
    """
    return handle.done()


def synchronize(handle: Handle[ResultT]) -> ResultT:
    """Wait until the operation is complete, and return its result: a tensor, or a list of a grouped operation.

    Args:
        handle: returned by an `_async` operation.

    Raises:
        MismatchError: ranks submitted different operations under the name; it is a RuntimeError.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return handle.wait()
