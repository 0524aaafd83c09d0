"""The array border: turns arrays of users into contiguous memory with an element type, and results into arrays.

A NumPy array in gives a NumPy array out, a PyTorch tensor a tensor. Other objects in main memory that offer DLPack, the
buffer protocol or `__array__` (JAX arrays, `array.array`, bytes) are read in place; their results are NumPy arrays. A
Python number counts as an array without axes (bool, int64, float64, complex128). This module never imports PyTorch: a
program that passes a tensor has imported it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from ronde.errors import UsageError
from ronde.types import DType

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArrayT",
    "Number",
    "Operand",
    "ResultT",
    "Target",
    "check_not_masked",
    "copy",
    "late_target",
    "like",
    "maker_like",
    "operand",
    "overlap",
    "target",
]

# The arrays whose results are of the same kind. A type checker accepts these, and a number where an overload says that
# it gives a NumPy array; for anything else that `operand` reads, it wants `numpy.asarray(x)`.
ArrayT = TypeVar("ArrayT", bound="np.ndarray[Any, Any] | torch.Tensor")
Number = complex | np.generic
ResultT = TypeVar("ResultT")

# A device code of DLPack, dlpack.h: kDLCPU.
_MAIN_MEMORY = 1

# NumPy's own element types in this machine's byte order. Other types take a slower path.
_NUMPY_DTYPES: dict[Any, DType] = {
    np.dtype(dtype.name): dtype for dtype in DType if dtype is not DType.bfloat16
}


class Operand(NamedTuple):
    """An input: `memory` is contiguous and readable by the native side, `source` is the user's array."""

    memory: Any
    dtype: DType
    shape: tuple[int, ...]
    source: Any

    @property
    def row_count(self) -> int:
        """Length of the first axis; a 0-d array is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def row_items(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.row_items * self.dtype.itemsize


class Target(NamedTuple, Generic[ResultT]):
    """An output: the native side writes `memory`; then `finish` returns the user's array.

    `refusal`: the error in the user's `out`, found when other ranks already wait for this one. The rank then takes part
    with other memory, and `finish` raises the error.
    """

    memory: Any
    result: ResultT
    is_copy: bool
    refusal: UsageError | None = None

    def finish(self) -> ResultT:
        if self.refusal:  # a new one each time: what is raised keeps the frames of its callers
            raise type(self.refusal)(*self.refusal.args)
        if self.is_copy:
            _copy(self.result, self.memory)
        return self.result


def operand(x: Any, anywhere: bool = False) -> Operand:
    """Return the array as an input. Raises UsageError if it is not an array, or one of an unsupported kind.

    `anywhere`: a tensor may be on any device; this function does not touch its memory.
    """
    if type(x) is np.ndarray and x.flags.c_contiguous:  # nothing to prepare
        dtype = _NUMPY_DTYPES.get(x.dtype)
        if dtype is not None:
            return Operand(x, dtype, x.shape, x)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _tensor_operand(torch, x, anywhere)
    array = _as_numpy(x)
    dtype = _dtype_of(array.dtype.name, array)
    if not array.dtype.isnative:
        raise UsageError(
            f"the array has the other byte order ({array.dtype.str}); convert it with astype() first"
        )
    return Operand(_exportable(np.ascontiguousarray(array)), dtype, array.shape, x)


def like(x: ArrayT) -> ArrayT:
    """Return a new, uninitialised array of the same kind, type and shape."""
    if type(x) is np.ndarray:
        return np.empty(x.shape, x.dtype)  # type: ignore[return-value]
    given = operand(x)
    result: ArrayT = _new(given, given.shape)
    return result


def maker_like(given: Operand) -> Callable[[], Any] | None:
    """Return a function that makes new arrays like the input; None unless it is a contiguous NumPy array or tensor."""
    source = given.source
    if source is not given.memory:
        return None
    if type(source) is np.ndarray:
        return partial(np.empty, given.shape, source.dtype)
    torch = sys.modules.get("torch")
    if torch is None or type(source) is not torch.Tensor or not source.is_cpu:
        return None
    return partial(torch.empty, given.shape, dtype=source.dtype, device=source.device)


def target(given: Operand, shape: tuple[int, ...], out: ResultT | None = None) -> Target[ResultT]:
    """Return the target of a result of this shape: `out`, or a new array of the input's kind and type.

    Raises UsageError if `out` has another type or shape, or cannot be written.
    """
    if out is None:
        result = _new(given, shape)
        return Target(_memory_of_new(result), result, False)
    taken = operand(out, anywhere=_is_tensor(given.memory) and not given.memory.is_cpu)
    if taken.dtype != given.dtype:
        raise UsageError(f"out holds {taken.dtype.name} values, the result {given.dtype.name}")
    if taken.shape != shape:
        raise UsageError(f"out has shape {taken.shape}, the result has shape {shape}")
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise UsageError("out is read-only")
    elif not _is_tensor(out):
        raise UsageError(f"out must be a NumPy array or a PyTorch tensor, not {type(out).__name__}")
    if (
        out is not given.source
        and overlap(given.memory, taken.memory)
        and _span(given.memory) != _span(taken.memory)
    ):
        raise UsageError("out overlaps the input; it may be the input itself or other memory")
    return Target(taken.memory, out, not _is_contiguous(out))


def late_target(given: Operand, shape: tuple[int, ...], out: ResultT | None = None) -> Target[ResultT]:
    """Return the same for a call that has begun: an error in `out` is raised when the call has ended."""
    try:
        return target(given, shape, out)
    except UsageError as error:
        refusal = UsageError(
            f"{error}. The shape of the result depends on the other ranks, so they have made this call and have their "
            "results: correct out, and do not repeat the call on this rank alone"
        )
        return target(given, shape)._replace(refusal=refusal)


def overlap(one: Any, other: Any) -> bool:
    """Return whether two contiguous memories have bytes in common."""
    if type(one) is np.ndarray and type(other) is np.ndarray:
        return np.may_share_memory(one, other)  # compares the bounds, quickly
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    return max(begin, other_begin) < min(end, other_end)


def _span(memory: Any) -> tuple[int, int]:
    """The addresses where the memory begins and ends."""
    if memory is None:
        return 0, 0
    begin: int = memory.data_ptr() if _is_tensor(memory) else memory.__array_interface__["data"][0]
    return begin, begin + memory.nbytes


def copy(given: Operand, goal: Target[Any]) -> None:
    """Copy the input into the output's memory, which has the same type and shape."""
    if given.memory.nbytes > 0:  # an empty array may have any strides, with which it has no view as bytes
        _bytes_of(goal.memory)[:] = _bytes_of(given.memory)


def _bytes_of(memory: Any) -> np.ndarray[Any, Any]:
    flat = memory.reshape(-1)
    if _is_tensor(memory):
        return flat.view(sys.modules["torch"].uint8).numpy()  # type: ignore[no-any-return]
    return flat.view(np.uint8)  # type: ignore[no-any-return]


def _is_tensor(x: Any) -> bool:
    if type(x) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_contiguous(x: Any) -> bool:
    if not _is_tensor(x):
        return bool(x.flags.c_contiguous)
    return bool(x.is_contiguous() and not x.is_conj() and not x.is_neg())


def check_not_masked(x: Any, name: str = "the array") -> None:
    """Raise UsageError if `x` is a masked array of NumPy: the operation would use the values under its mask.

    `name`: what `x` is for the caller, for the error.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(
            f"{name} is a masked array, whose mask would have no effect: pass x.filled(value) with a value for the "
            "masked elements, or x.data and x.mask as two arrays"
        )


def _as_numpy(x: Any) -> np.ndarray[Any, Any]:
    if isinstance(x, np.ndarray):
        check_not_masked(x)
        return x
    if isinstance(x, np.generic | int | float | complex):
        return np.asarray(x)
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) != _MAIN_MEMORY:
        raise UsageError(f"the {type(x).__name__} is not in main memory; move it to the CPU first")
    if hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        return np.asarray(x)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        pass
    advice = ""
    if isinstance(x, list | tuple):
        advice = "; convert it with numpy.asarray()"
    elif isinstance(x, dict | set | str):
        advice = "; to send other objects, use broadcast_object() or allgather_object()"
    raise UsageError(
        "expected an array (NumPy, PyTorch, or anything with DLPack or the buffer protocol), got "
        f"{type(x).__name__}{advice}"
    )


def _dtype_of(name: str, array: Any) -> DType:
    dtype = DType.__members__.get(name)
    if dtype is None:
        supported = ", ".join(DType.__members__)
        raise UsageError(
            f"the dtype {name} of the {type(array).__name__} is not supported; convert it to {supported}"
        )
    return dtype


def _exportable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # NumPy's own types export buffers. bfloat16 comes from ml_dtypes, whose arrays do not.
    return array if array.dtype in _NUMPY_DTYPES else array.view(np.uint16)


# PyTorch's element types that have occurred: asking for their names is slow.
_torch_dtypes: dict[Any, DType] = {}


def _tensor_operand(torch: Any, x: Any, anywhere: bool) -> Operand:
    if not x.is_cpu and not anywhere:
        raise UsageError(f"the tensor is on {x.device}; move it to the CPU first")
    if x.layout is not torch.strided:
        raise UsageError(f"the tensor's layout is {x.layout}; only dense tensors are supported")
    dtype = _torch_dtypes.get(x.dtype)
    if dtype is None:
        dtype = _torch_dtypes[x.dtype] = _dtype_of(str(x.dtype).removeprefix("torch."), x)
    memory = x.detach() if x.requires_grad else x
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        memory = memory.resolve_conj().resolve_neg().contiguous()
    return Operand(memory, dtype, tuple(x.shape), x)


def _new(given: Operand, shape: tuple[int, ...]) -> Any:
    if _is_tensor(given.source):
        source = given.source
        return sys.modules["torch"].empty(shape, dtype=source.dtype, device=source.device)
    if isinstance(given.source, (np.ndarray, np.generic)):
        return np.empty(shape, given.source.dtype)
    return np.empty(shape, _as_numpy(given.source).dtype)


def _memory_of_new(result: Any) -> Any:
    return result if _is_tensor(result) else _exportable(result)


def _copy(result: Any, memory: Any) -> None:
    if _is_tensor(result):
        result.detach().copy_(memory.view(result.shape))
    else:
        result[...] = memory.view(result.dtype).reshape(result.shape)
