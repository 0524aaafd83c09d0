"""torch.distributed's own store as a `Store`: under torchrun its agent already listens where the ranks are to meet.

Whoever reaches that port can read and write there; torch's store knows no authentication.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore

from ronde.errors import PeerLostError, TimeoutError, UsageError
from ronde.net.addresses import Address
from ronde.net.stores.base import check_key, check_value, waited_in_vain

__all__ = ["TorchStore"]


class TorchStore:
    """The `Store` that torch serves at `host:port`, with all keys under `prefix`.

    Differs from the others in one thing: adding to what is no number makes torch hang up, so it raises PeerLostError.
    Raises TimeoutError if nothing answers before `timeout_ns`.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout_ns: int) -> None:
        self._target = Address(host=host, port=port)
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_delta(timeout_ns))
        except (DistNetworkError, DistStoreError) as error:
            message = (
                f"waited {timeout_ns / 1e9:g} s for torch's store at {self.address}: {_first_line(error)}"
            )
            raise TimeoutError(message, operation="store", waited_ns=timeout_ns) from None
        self._open: PrefixStore | None = PrefixStore(prefix, store)

    @property
    def address(self) -> str:
        return str(self._target)

    def set(self, key: str, value: bytes) -> None:
        check_key(key), check_value(key, value)
        try:
            self._store.set(key, value)
        except DistNetworkError as error:
            raise self._lost(error) from None

    def get(self, key: str, timeout_ns: int) -> bytes:
        self.wait([key], timeout_ns)
        try:
            return bytes(self._store.get(key))
        except DistNetworkError as error:
            raise self._lost(error) from None

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        for key in keys:
            check_key(key)
        try:
            if self._store.check(keys):
                return
            if timeout_ns > 0:
                self._store.wait(keys, _delta(timeout_ns))
                return
        except DistStoreError:
            pass
        except DistNetworkError as error:
            raise self._lost(error) from None
        raise waited_in_vain(", ".join(keys), self.address, timeout_ns)

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        try:
            return int(self._store.add(key, amount))
        except DistNetworkError as error:
            raise self._lost(error) from None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        check_key(key), check_value(key, expected), check_value(key, desired)
        try:
            value = bytes(self._store.compare_set(key, expected, desired))
            # For a key that is not there torch returns what was expected.
            absent = value == expected != b"" and not self._store.check([key])
        except DistNetworkError as error:
            raise self._lost(error) from None
        return b"" if absent else value

    def delete_key(self, key: str) -> bool:
        check_key(key)
        try:
            return bool(self._store.delete_key(key))
        except DistNetworkError as error:
            raise self._lost(error) from None

    def close(self) -> None:
        self._open = None  # torch hangs up with the last reference

    @property
    def _store(self) -> PrefixStore:
        if not self._open:
            raise UsageError(f"the connection to the store at {self.address} has been closed")
        return self._open

    def _lost(self, error: Exception) -> PeerLostError:
        return PeerLostError(f"lost torch's store at {self.address}: {_first_line(error)}")


def _delta(timeout_ns: int) -> timedelta:
    return timedelta(milliseconds=max(1, timeout_ns // 10**6))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
