"""The job's store as a store of torch.distributed, for process groups of PyTorch. Imports PyTorch."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from ronde.backends.backend import BackendContext
from ronde.errors import TimeoutError
from ronde.stores.memory import MemoryStore

__all__ = ["JobStore"]

_SLICE_NS = 250_000_000  # how often a wait checks whether the world has failed


class JobStore(Store):  # type: ignore[misc]
    """A view of the job's store in which all keys begin with the context's purpose; in memory for a single rank."""

    def __init__(self, place: BackendContext) -> None:
        super().__init__()
        self._place = place
        self._below = place.store or MemoryStore()
        self._mine: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        self._mine.add(key)
        self._below.set(self._full(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        patience, limit_ns = self._place.patience("the start of a backend"), self._place.start_timeout_ns
        while True:
            try:
                return self._below.get(self._full(key), _SLICE_NS)
            except TimeoutError:
                patience.check()
                if patience.waited_ns > limit_ns:
                    raise

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        try:
            self._below.wait([self._full(key) for key in keys], 0)
        except TimeoutError:
            return False
        return True

    def add(self, key: str, amount: int) -> int:
        self._mine.add(key)
        return self._below.add(self._full(key), amount)

    def delete_key(self, key: str) -> bool:
        return self._below.delete_key(self._full(key))

    def forget(self) -> None:
        """Remove the keys that this rank has set."""
        for key in self._mine:
            self._below.delete_key(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._place.purpose}/{key}"
