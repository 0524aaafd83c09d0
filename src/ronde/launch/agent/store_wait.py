"""A thread of an agent that waits for something in the store of a round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from ronde.errors import RondeError
from ronde.job_key import JobKey
from ronde.net.event_queue import EventQueue

if TYPE_CHECKING:
    from ronde.stores.store import Store

__all__ = ["StoreWait"]

CONNECT_NS = 30 * 10**9

T = TypeVar("T")


class StoreWait(Generic[T]):
    """Calls `find` with the store at this address in a thread. Raises OSError or RuntimeError if none can begin.

    `close` ends the wait. Without the store, and the round with it, nothing is found.
    """

    def __init__(self, address: str, key: JobKey, find: Callable[[Store], T]) -> None:
        self._found: EventQueue[T] = EventQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._store: Store | None = None
        try:
            threading.Thread(
                target=self._run, args=(address, key, find), daemon=True, name="ronde-store-wait"
            ).start()
        except RuntimeError:
            self._found.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `find` has returned."""
        return self._found.fileno()

    def take(self) -> T:
        """Return what `find` has returned, once the descriptor is readable."""
        return self._found.take()[0]

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed, store = True, self._store
        if store:
            store.close()
        self._found.close()

    def _run(self, address: str, key: JobKey, find: Callable[[Store], T]) -> None:
        from ronde.stores.tcp import StoreClient

        try:
            store = StoreClient(address, key, CONNECT_NS)
            try:
                with self._lock:
                    if self._closed:
                        return
                    self._store = store
                self._found.put(find(store))
            finally:
                store.close()
        except (RondeError, ValueError):
            pass  # the store is gone, and the round with it; or the wait has been closed
