"""Operations in flight: what an `_async` operation returns, and how results are completed when a thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch

__all__ = [
    "CompletedHandle",
    "Group",
    "Handle",
    "Received",
    "poll",
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
