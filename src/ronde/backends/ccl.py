"""The backend `ccl`: oneCCL on the processor, by ctypes; `pip install oneccl` brings the library (nearly 2 GB).

oneCCL cannot be interrupted and has no working abort: its C interface declares one that the library lacks. So a
separate thread makes the calls, and a call that does not end after a failure keeps that thread for good. Such a call
may still write to memory of this module, never to that of a tensor.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ronde.backends.backend import Backend, BackendContext
from ronde.environment import set_defaults
from ronde.errors import TimeoutError
from ronde.types import DType, Kind, Max, Min, Product, ReduceOp, Sum

__all__ = ["CCL", "is_installed"]

# Numbers of oneapi/ccl.h.
_TYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float32": 7, "float64": 8}
_OPERATIONS = {Sum: 0, Product: 1, Max: 2, Min: 3}
_UNIQUE_ID_BYTES = 4096

# In the order of their dependencies, because they do not find each other.
_LIBRARIES = (
    *("libintlc.so.5", "libimf.so", "libsvml.so", "libirng.so", "libsycl.so.[0-9]*", "libfabric.so.1"),
    *("libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so"),
)
_LOOK_S = 0.05
_SLICE_NS = 250_000_000


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _UNIQUE_ID_BYTES),)


class _CclProcess:
    """The state of oneCCL in this process; one instance, below."""

    library: ctypes.CDLL | None = None
    has_failed: bool = False


_process = _CclProcess()


class CCL(Backend):
    """A communicator of oneCCL, over libfabric's sockets."""

    name = "ccl"

    def __init__(self, place: BackendContext) -> None:
        super().__init__(place)
        self._comm = ctypes.c_void_p()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    def missing(self) -> str | None:
        if _process.has_failed:
            return "oneCCL has failed in this process before and cannot be used again"
        try:
            library = _load()
        except OSError as error:
            return f"oneCCL cannot be loaded ({error})"
        version = ctypes.c_int()
        if library.onecclGetVersion(ctypes.byref(version)) or not version.value:
            return f"oneCCL does not initialize ({_last_error(library)})"
        return self.place.lack_of_store()

    def open(self) -> None:
        threading.Thread(target=self._make_calls, name="ronde-ccl", daemon=True).start()
        library, place = _load(), self.place
        shared = self._share_id(library)
        self._await_call(
            "start",
            lambda: library.onecclCommInitRank(ctypes.byref(self._comm), place.size, shared, place.rank),
        )

    def close(self, failed: bool) -> None:
        if failed:
            _process.has_failed = True
        elif self._comm:
            comm = self._comm
            self._await_call("shutdown", lambda: _load().onecclCommDestroy(comm))
        self._comm = ctypes.c_void_p()
        self._calls.put(None)

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        if kind in (Kind.allreduce, Kind.reducescatter):
            return dtype.name in _TYPES and op in _OPERATIONS
        return True

    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        if x.size:
            out[:] = self._reduced(x, op)

    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce the whole array, and keep the share: oneCCL does not support shares of different sizes."""
        if x.size:
            begin = sum(counts[: self.place.rank])
            out[:] = self._reduced(x, op)[begin : begin + out.size]

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Gather arrays that are padded to the longest: oneCCL expects the same size from all ranks."""
        rows = np.empty((len(sizes), max(sizes)), np.uint8)
        mine = np.zeros(max(sizes), np.uint8)
        mine[: x.size] = x
        self._call_collective("onecclAllGather", "allgather", mine, rows, mine.size, _TYPES["uint8"])
        out[:] = np.concatenate([row[:size] for row, size in zip(rows, sizes)])

    def broadcast(self, data: Any, root: int) -> None:
        copy = data.copy()
        self._call_collective("onecclBroadcast", "broadcast", copy, copy, copy.size, _TYPES["uint8"], root)
        data[:] = copy

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        """Exchange parts that are padded to the longest of all ranks, which an all-reduce determines first."""
        own = np.array([max(*in_sizes, *out_sizes)], np.int64)
        longest = int(self._reduced(own, Max)[0])
        if not longest:
            return
        sent, received = np.zeros((2, len(in_sizes), longest), np.uint8)
        begin = 0
        for row, size in zip(sent, in_sizes):
            row[:size] = x[begin : begin + size]
            begin += size
        self._call_collective("onecclAllToAll", "alltoall", sent, received, longest, _TYPES["uint8"])
        out[:] = np.concatenate([row[:size] for row, size in zip(received, out_sizes)])

    def barrier(self) -> None:
        self._reduced(np.zeros(1, np.int32), Sum)

    def _reduced(self, x: Any, op: ReduceOp) -> Any:
        copy = x.copy()
        self._call_collective(
            "onecclAllReduce", "reduction", copy, copy, copy.size, _TYPES[x.dtype.name], _OPERATIONS[op]
        )
        return copy

    def _call_collective(
        self, function: str, operation: str, sent: Any, received: Any, count: int, *terms: int
    ) -> None:
        begin = getattr(_load(), function)
        pointers = ctypes.c_void_p(sent.ctypes.data), ctypes.c_void_p(received.ctypes.data)
        numbers = [ctypes.c_size_t(count), *(ctypes.c_int(term) for term in terms)]
        self._await_call(operation, lambda: begin(*pointers, *numbers, self._comm, None), sent, received)

    def _await_call(self, operation: str, action: Callable[[], int], *memory: Any) -> None:
        """Let the thread make a call, and wait for its end. Raises RuntimeError, and the errors of Patience."""
        call = _Call(action, memory)
        self._calls.put(call)
        patience = self.place.patience(f"{operation} by ccl")
        while not call.is_over.wait(_LOOK_S):
            patience.check()
        if call.result:
            raise RuntimeError(f"oneCCL returned {call.result}: {_last_error(_load())}")

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call.result = call.action()
            call.is_over.set()

    def _share_id(self, library: ctypes.CDLL) -> _UniqueId:
        """Return rank 0's id on all ranks."""
        shared, store = _UniqueId(), self.place.store
        key = f"{self.place.purpose}/id"
        if self.place.rank == 0:
            if library.onecclGetUniqueId(ctypes.byref(shared)):
                raise RuntimeError(f"oneCCL has no id to share: {_last_error(library)}")
            if store is not None:
                store.set(key, bytes(memoryview(shared).cast("B")))
        elif store is not None:
            patience = self.place.patience("the start of ccl")
            ctypes.memmove(ctypes.byref(shared), _awaited_value(store, key, patience.check), _UNIQUE_ID_BYTES)
        return shared


class _Call:
    """One call of oneCCL. It keeps the memory that it uses alive."""

    def __init__(self, action: Callable[[], int], memory: tuple[Any, ...]) -> None:
        self.action = action
        self.memory = memory
        self.result = 0
        self.is_over = threading.Event()


def _awaited_value(store: Any, key: str, check: Callable[[], None]) -> bytes:
    while True:
        try:
            value: bytes = store.get(key, _SLICE_NS)
            return value
        except TimeoutError:
            check()


def is_installed() -> bool:
    """Return whether pip has installed the library."""
    return (_folder() / "libccl.so.2").exists()


def _folder() -> Path:
    return Path(sys.prefix, "lib")


def _load() -> ctypes.CDLL:
    """Return the library. Raises OSError."""
    if _process.library is None:
        folder = _folder()
        if not is_installed():
            raise OSError(f"{folder}/libccl.so.2 does not exist: pip install oneccl")
        # The plugin for processors, because the default needs a GPU; and libfabric, because the default needs MPI.
        set_defaults(
            CCL_PLUGIN="ONECCL_LEGACY_CPU",
            CCL_ATL_TRANSPORT="ofi",
            CCL_LOG_LEVEL="error",
            CCL_ROOT=str(folder.parent),
            FI_PROVIDER_PATH=str(folder),
        )
        loaded = {}
        for name in _LIBRARIES:
            path = min(folder.glob(name), default=folder / name)
            loaded[name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        library = loaded["libccl.so.2"]
        library.onecclGetLastError.restype = ctypes.c_char_p
        library.onecclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _UniqueId, ctypes.c_int]
        _process.library = library
    return _process.library


def _last_error(library: ctypes.CDLL) -> str:
    return bytes(library.onecclGetLastError(None) or b"it gives no reason").decode(errors="replace")
