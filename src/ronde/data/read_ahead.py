"""Prepares the next items of an iterator in a thread while the caller works on one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["read_ahead"]


T = TypeVar("T")


class _Items(Generic[T]):
    """What the thread shares with the caller: the items that are ready, and room for more."""

    def __init__(self, depth: int) -> None:
        # (True, an item), or (False, an error or None).
        self.ready: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self.room = threading.Semaphore(depth)
        self.is_left = False

    def fetch(self, items: Iterator[T]) -> None:
        error: BaseException | None = None
        try:
            while self.room.acquire() and not self.is_left:
                self.ready.put((True, next(items)))
        except StopIteration:
            pass
        except BaseException as problem:
            error = problem
        self.ready.put((False, error))


def read_ahead(items: Iterator[T], depth: int) -> Generator[T]:
    """Yield the items, of which a thread prepares some. It ends when the iterator ends or is closed.

    `depth`: how many items there are at most, also counting the one that the caller has.
    """
    shared: _Items[T] = _Items(depth)
    thread = threading.Thread(target=shared.fetch, args=(items,), name="ronde-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            is_item, value = shared.ready.get()
            if not is_item:
                break
            yield value
            shared.room.release()
        if value is not None:
            raise value
    finally:
        shared.is_left = True
        shared.room.release()
        thread.join()
