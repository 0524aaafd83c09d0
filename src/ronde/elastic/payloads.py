"""The payload of a part of a state as bytes, and back: for snapshots, copies on other hosts, and comparisons.

A payload is a tree: dicts, lists and tuples of arrays, tensors, numbers, texts and bytes. It is written without a
pickle: a text describes the tree, and the bytes of its arrays follow in order. Objects of other classes become pickles,
which can run any program, so the reader says whether it takes them.

Arrays are not copied to be packed. The bytes are those of the memory in which they lie, so they are valid until that
changes.
"""

from __future__ import annotations

import importlib
import json
import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde.errors import ProtocolError, UsageError

__all__ = ["Packed", "digest_items", "pack", "unpack"]


class Packed(NamedTuple):
    """A payload as bytes.

    Attributes:
        text: the description of the tree, JSON.
        buffers: the bytes of its arrays, in order.
    """

    text: str
    buffers: list[memoryview]

    @property
    def num_bytes(self) -> int:
        """The number of bytes in all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


def pack(payload: object) -> Packed:
    """Return the payload as bytes. Arrays and tensors on the CPU are not copied if they are contiguous.

    Raises UsageError for an object that cannot be pickled.
    """
    packer = _Packer()
    form = packer.form(payload)
    sizes = [buffer.nbytes for buffer in packer.buffers]
    return Packed(json.dumps({"tree": form, "sizes": sizes}, separators=(",", ":")), packer.buffers)


def unpack(text: str, data: memoryview, takes_pickles: bool) -> Any:
    """Return the payload of a description and the bytes of all its buffers. Its arrays are new and can be written.

    `takes_pickles`: whether nobody else can have decided on the bytes. Raises ProtocolError for other bytes than `pack`
    returns, and UsageError for a pickle if it takes none.
    """
    try:
        description = json.loads(text)
        return _Unpacker(description["sizes"], data, takes_pickles).value(description["tree"])
    except UsageError:
        raise
    except Exception as error:  # of a pickle, too
        raise ProtocolError(f"malformed payload: {error}") from error


def digest_items(payload: object) -> Iterator[bytes | memoryview]:
    """Yield bytes that are equal on all ranks whose payloads have equal arrays, numbers and texts.

    Keys of dicts are sorted by their `repr`. Objects of other classes are left out: equal ones have different pickles.
    """
    packer = _Packer(is_ordered=True)
    yield json.dumps(packer.form(payload)).encode()
    yield from packer.buffers


class _Packer:
    """`is_ordered`: describe equal payloads equally, without pickles."""

    def __init__(self, is_ordered: bool = False) -> None:
        self.buffers: list[memoryview] = []
        self._is_ordered = is_ordered

    def form(self, value: Any) -> list[Any]:
        """Return the description of a value, and add its bytes to `buffers`."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return ["value", value]
        if kind in (dict, OrderedDict):
            items = (
                sorted(value.items(), key=lambda item: repr(item[0])) if self._is_ordered else value.items()
            )
            return [kind.__name__, [[self.form(key), self.form(item)] for key, item in items]]
        if kind in (list, tuple):
            return [kind.__name__, [self.form(item) for item in value]]
        if kind in (bytes, bytearray):
            return [kind.__name__, self._add(memoryview(value).cast("B"))]
        if isinstance(value, np.ndarray | np.generic) and _is_plain(value):
            name = "scalar" if isinstance(value, np.generic) else "array"
            flat = np.ascontiguousarray(value).reshape(-1)
            return [name, value.dtype.str, list(value.shape), self._add(_bytes_of(flat))]
        if (torch := sys.modules.get("torch")) is not None and kind in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(torch, value)
        return ["object", kind.__qualname__] if self._is_ordered else ["pickle", self._add(_pickled(value))]

    def _tensor(self, torch: Any, tensor: Any) -> list[Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return ["pickle", self._add(_pickled(tensor))]
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = _bytes_of(flat.view(torch.uint8).numpy())
        name = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._add(data)]

    def _add(self, data: memoryview) -> int:
        self.buffers.append(data)
        return len(self.buffers) - 1


def _is_plain(array: Any) -> bool:
    """Return whether the bytes and `dtype.str` are the whole array. Subclasses have more, and so have records."""
    dtype = array.dtype
    return (type(array) is np.ndarray or isinstance(array, np.generic)) and dtype.kind in "biufcSUmM"


def _bytes_of(flat: np.ndarray[Any, Any]) -> memoryview:
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def _pickled(value: Any) -> memoryview:
    try:
        return memoryview(pickle.dumps(value, protocol=5))
    except Exception as error:
        raise UsageError(f"a {type(value).__qualname__} of the state cannot be pickled: {error}") from error


class _Unpacker:
    def __init__(self, sizes: Sequence[int], data: memoryview, takes_pickles: bool) -> None:
        self._takes_pickles = takes_pickles
        self._buffers = []
        begin = 0
        for size in sizes:
            if type(size) is not int or size < 0:
                raise ProtocolError(f"{size!r} is not a number of bytes")
            self._buffers.append(data[begin : begin + size])
            begin += size
        if begin != data.nbytes:
            raise ProtocolError(f"{data.nbytes} bytes, where {begin} were announced")

    def value(self, form: Sequence[Any]) -> Any:
        match form:
            case ["value", value]:
                return value
            case ["dict", items]:
                return {self.value(key): self.value(item) for key, item in items}
            case ["OrderedDict", items]:
                return OrderedDict((self.value(key), self.value(item)) for key, item in items)
            case ["list", items]:
                return [self.value(item) for item in items]
            case ["tuple", items]:
                return tuple(self.value(item) for item in items)
            case ["bytes", index]:
                return bytes(self._buffers[index])
            case ["bytearray", index]:
                return bytearray(self._buffers[index])
            case ["array", dtype, shape, index]:
                return self._array(dtype, shape, index)
            case ["scalar", dtype, shape, index]:
                return self._array(dtype, shape, index)[()]
            case ["tensor" | "parameter" as kind, name, shape, index]:
                return self._tensor(kind, name, shape, index)
            case ["pickle", index]:
                return self._unpickled(index)
        raise ProtocolError(f"an unknown form: {str(form)[:80]}")

    def _array(self, name: str, shape: Sequence[int], index: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(name)
        if dtype.hasobject:
            raise ProtocolError(f"an array of the dtype {name}")
        array = np.empty(shape, dtype)
        self._fill(array.reshape(-1), index)
        return array

    def _tensor(self, kind: str, name: str, shape: Sequence[int], index: int) -> Any:
        torch = importlib.import_module("torch")  # the payload's program uses it
        tensor = torch.empty(math.prod(shape), dtype=getattr(torch, name))
        if tensor.numel():
            self._fill(tensor.view(torch.uint8).numpy(), index)
        tensor = tensor.reshape(tuple(shape))
        return torch.nn.Parameter(tensor, tensor.is_floating_point()) if kind == "parameter" else tensor

    def _fill(self, flat: np.ndarray[Any, Any], index: int) -> None:
        if flat.nbytes != self._buffers[index].nbytes:
            raise ProtocolError(
                f"an array of {flat.nbytes} bytes, whose data has {self._buffers[index].nbytes}"
            )
        if flat.size:
            flat.view(np.uint8)[:] = np.frombuffer(self._buffers[index], np.uint8)

    def _unpickled(self, index: int) -> Any:
        if not self._takes_pickles:
            raise UsageError("the state contains an object that only a pickle can describe")
        return pickle.loads(self._buffers[index])
