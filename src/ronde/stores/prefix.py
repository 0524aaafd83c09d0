"""The part of a store whose keys start with a prefix, under names without the prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ronde.stores.store import Store, check_key, key_list

__all__ = ["PrefixStore"]


class PrefixStore:
    """The `Store` within `store` whose keys and queues all begin with `prefix`; prefixes nest.

    It is the same client under other names, so closing one closes both. Messages show the whole keys. The prefix counts
    towards a key's 1,024 bytes. `num_keys` counts all keys of the store, but `delete_prefix("")` deletes only those
    with the prefix.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    @property
    def address(self) -> str:
        return self._store.address

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._full(key), value)

    def get(self, key: str, timeout_ns: int) -> bytes:
        return self._store.get(self._full(key), timeout_ns)

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        self._store.wait([self._full(key) for key in key_list(keys)], timeout_ns)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store.compare_set(self._full(key), expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._full(key) for key in key_list(keys)])

    def num_keys(self) -> int:
        return self._store.num_keys()

    def append(self, key: str, value: bytes) -> None:
        self._store.append(self._full(key), value)

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        return self._store.multi_get([self._full(key) for key in key_list(keys)], timeout_ns)

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        self._store.multi_set({self._full(key): value for key, value in values.items()})

    def delete_prefix(self, prefix: str) -> int:
        return self._store.delete_prefix(self._prefix + prefix)

    def queue_push(self, queue: str, value: bytes) -> None:
        self._store.queue_push(self._full(queue), value)

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        return self._store.queue_pop(self._full(queue), timeout_ns)

    def queue_len(self, queue: str) -> int:
        return self._store.queue_len(self._full(queue))

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        changed = self._store.watch({self._full(key): value for key, value in known.items()}, timeout_ns)
        return {key[len(self._prefix) :]: value for key, value in changed.items()}

    def hold(self, key: str, value: bytes) -> None:
        self._store.hold(self._full(key), value)

    def fork(self) -> PrefixStore:
        return PrefixStore(self._store.fork(), self._prefix)

    def close(self) -> None:
        self._store.close()

    def _full(self, key: str) -> str:
        check_key(key)  # the prefix would make "" valid
        return self._prefix + key
