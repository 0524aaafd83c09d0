"""The operations of a store that read its table, for the stores that have the whole table in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ronde.stores.base import check_key, missing_of, several, waited_in_vain
from ronde.stores.table import Table

__all__ = ["TableReader"]

Found = TypeVar("Found")


class TableReader(ABC):
    """The half of a `Store` that only reads, by two functions of the other half."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the store, for messages."""

    @abstractmethod
    def _query_table(self, query: Callable[[Table], Found], names: Iterable[bytes] | None) -> Found:
        """Return the result of the query. `names`: the keys that it reads, None: all."""

    @abstractmethod
    def _wait_until(
        self, query: Callable[[Table], Found | None], names: Sequence[bytes], timeout_ns: int
    ) -> Found | None:
        """Return the result of the query as soon as it is not None, or None after the timeout."""

    def get(self, key: str, timeout_ns: int) -> bytes:
        encoded = check_key(key)
        value = self._wait_until(lambda table: table.get(encoded), [encoded], timeout_ns)
        if value is None:
            raise waited_in_vain(key, self.address, timeout_ns)
        return value

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        missing = {check_key(key): key for key in several(keys)}

        def query(table: Table) -> bool | None:
            for name in [name for name in missing if table.get(name) is not None]:
                del missing[name]
            return not missing or None

        if not self._wait_until(query, list(missing), timeout_ns):
            raise waited_in_vain(missing.values(), self.address, timeout_ns)

    def check(self, keys: Sequence[str]) -> bool:
        encoded = [check_key(key) for key in several(keys)]
        return self._query_table(lambda table: table.check(encoded), encoded)

    def num_keys(self) -> int:
        return self._query_table(Table.num_keys, None)

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        encoded = [check_key(key) for key in several(keys)]
        values = self._wait_until(lambda table: table.multi_get(encoded), encoded, timeout_ns)
        if values is None:
            raise waited_in_vain(missing_of(keys, self.check), self.address, timeout_ns)
        return values

    def queue_len(self, queue: str) -> int:
        encoded = check_key(queue)
        return self._query_table(lambda table: table.queue_len(encoded), ())

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        encoded = {check_key(key): value for key, value in known.items()}
        found = self._wait_until(lambda table: table.differing(encoded) or None, list(encoded), timeout_ns)
        return {key.decode(): value for key, value in (found or {}).items()}
