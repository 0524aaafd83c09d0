"""A store of torch.distributed as a `Store`: torchrun's agent serves one, and process groups are made with one.

Every process that reaches its port or its file can read and write there, because it has no authentication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NoReturn, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed import Store as TorchsOwnStore

from ronde.errors import PeerLostError, TimeoutError, UsageError
from ronde.net.addresses import Address
from ronde.stores.store import check_amount, check_key, check_value, key_list, missing_keys_error, missing_of

__all__ = ["TorchStore"]

Answer = TypeVar("Answer")


class TorchStore:
    """A store of torch.distributed, made by the program or served at an address (`connect`).

    `address`: for messages. Unlike in other stores, adding to a value that is not a number raises PeerLostError,
    because torch closes the connection; appended values may exceed the limit; a key that is read while it is deleted
    may have any value; and `delete_prefix`, `watch`, `hold` and queues raise UsageError, because torch has no
    equivalent.
    """

    def __init__(
        self, store: TorchsOwnStore, address: str, reconnect: Callable[[], TorchStore] | None = None
    ) -> None:
        self._address = address
        self._open: TorchsOwnStore | None = store
        self._reconnect = reconnect

    @classmethod
    def connect(cls, host: str, port: int, prefix: str, timeout_ns: int) -> TorchStore:
        """Return the store that torch serves at `host:port`, with all keys under `prefix`.

        Raises TimeoutError if it does not answer before `timeout_ns`.
        """
        address = str(Address(host=host, port=port))
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_delta(timeout_ns))
        except (DistNetworkError, DistStoreError) as error:
            message = f"waited {timeout_ns / 1e9:g} s for torch's store at {address}: {_first_line(error)}"
            raise TimeoutError(message, operation="store", waited_ns=timeout_ns) from None
        reconnect = partial(cls.connect, host, port, prefix, timeout_ns)
        return cls(PrefixStore(prefix, store), address, reconnect)

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_key(key)
        value = check_value(key, value)
        self._change(key, lambda store: store.set(key, value))

    def get(self, key: str, timeout_ns: int) -> bytes:
        self.wait([key], timeout_ns)
        return bytes(self._query(lambda store: store.get(key)))

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        if self.check(keys):
            return
        if timeout_ns > 0:
            try:
                self._query(lambda store: store.wait(keys, _delta(timeout_ns)))
                return
            except RuntimeError as error:  # not DistStoreError if the store is in a file
                if not isinstance(error, DistStoreError) and "timeout" not in str(error):
                    raise
        raise missing_keys_error(missing_of(keys, self.check), self.address, timeout_ns)

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        check_amount(key, amount)
        return int(self._query(lambda store: store.add(key, amount)))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        check_key(key)
        expected, desired = check_value(key, expected), check_value(key, desired)
        value = bytes(self._query(lambda store: store.compare_set(key, expected, desired)))
        # For an absent key torch returns the expected value.
        absent = value == expected != b"" and not self.check([key])
        return b"" if absent else value

    def delete_key(self, key: str) -> bool:
        check_key(key)
        return bool(self._query(lambda store: store.delete_key(key)))

    def check(self, keys: Sequence[str]) -> bool:
        for key in key_list(keys):
            check_key(key)
        return bool(self._query(lambda store: store.check(list(keys))))

    def num_keys(self) -> int:
        return int(self._query(lambda store: store.num_keys()))

    def append(self, key: str, value: bytes) -> None:
        check_key(key)
        value = check_value(key, value)
        self._change(key, lambda store: store.append(key, value))

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        keys = key_list(keys)
        self.wait(keys, timeout_ns)
        return [bytes(value) for value in self._query(lambda store: store.multi_get(keys))] if keys else []

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        for key in values:
            check_key(key)
        values = {key: check_value(key, value) for key, value in values.items()}
        if values:
            self._change(
                next(iter(values)), lambda store: store.multi_set(list(values), list(values.values()))
            )

    def delete_prefix(self, prefix: str) -> int:
        self._refuse("cannot delete by prefix")

    def queue_push(self, queue: str, value: bytes) -> None:
        self._refuse("has no queues that can be waited for")

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        self._refuse("has no queues that can be waited for")

    def queue_len(self, queue: str) -> int:
        self._refuse("has no queues that can be waited for")

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        self._refuse("cannot watch keys")

    def hold(self, key: str, value: bytes) -> None:
        self._refuse("cannot hold keys")

    def fork(self) -> TorchStore:
        if self._reconnect is None:
            self._refuse("was made by the program, so that there is one connection to it")
        return self._reconnect()

    def close(self) -> None:
        self._open = None  # torch closes the connection with the last reference

    def _query(self, query: Callable[[TorchsOwnStore], Answer]) -> Answer:
        """Return torch's answer. Raises torch's DistStoreError or RuntimeError for a timeout."""
        if not self._open:
            raise UsageError(f"the connection to the store at {self.address} has been closed")
        try:
            return query(self._open)
        except DistNetworkError as error:
            raise PeerLostError(f"lost torch's store at {self.address}: {_first_line(error)}") from None

    def _change(self, key: str, change: Callable[[TorchsOwnStore], object]) -> None:
        """Make a change, and wait until it is visible to others; torch only sends it."""
        self._query(change)
        self.check([key])

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"torch's store at {self.address} {what}; meet at a store of Ronde's (tcp, file, etcd)"
        )


def _delta(timeout_ns: int) -> timedelta:
    return timedelta(milliseconds=max(1, timeout_ns // 10**6))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
