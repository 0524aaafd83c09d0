"""Values that processes of this machine share."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ronde.errors import UsageError
from ronde.launch.calls import pickler

__all__ = ["SharedValues"]

ALIGNMENT = 64  # bytes: of arrays in shared memory


@dataclass(frozen=True)
class _Stored:
    """Where a value lies in the memory: its pickle, and the buffers that this refers to; offsets and lengths."""

    pickled: tuple[int, int]
    buffers: tuple[tuple[int, int], ...]


class SharedValues:
    """Values in memory that processes of this machine share, until the stack of the process that made them closes.

    Each process loads the values that it needs. Large arrays in them are not copied before they are written to, and
    only the process that writes to them sees the change.
    """

    def __init__(self, values: Sequence[Any], stack: ExitStack) -> None:
        fd = os.memfd_create("ronde-data", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        with open(fd, "wb", closefd=False) as file:
            self._stored = [_store(value, file) for value in values]
        self._path = f"/proc/{os.getpid()}/fd/{fd}"

    def load(self, number: int, *, is_read_only: bool = False) -> Any:
        """Return a value, by its number in the sequence. `is_read_only`: whether its large arrays are."""
        stored = self._stored[number]
        access = mmap.ACCESS_READ if is_read_only else mmap.ACCESS_COPY
        with open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = memoryview(mmap.mmap(file.fileno(), size, access=access))

        def at(place: tuple[int, int]) -> memoryview:
            return memory[place[0] : place[0] + place[1]]

        return pickle.loads(at(stored.pickled), buffers=[at(place) for place in stored.buffers])


def _store(value: Any, file: Any) -> _Stored:
    buffers: list[pickle.PickleBuffer] = []
    try:
        packed = pickler().dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        raise UsageError(f"data cannot be sent to tasks: {type(error).__name__}: {error}") from None
    return _Stored(_append(packed, file), tuple(_append(buffer.raw(), file) for buffer in buffers))


def _append(data: Any, file: Any) -> tuple[int, int]:
    file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
    begin = file.tell()
    return begin, file.write(data)
