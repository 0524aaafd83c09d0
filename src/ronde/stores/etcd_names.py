"""Names in etcd for the content of a store: under its prefix, `k/` has keys, `q/` queues and `c/` counters.

All names are in base64, as the gateway expects them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode

from ronde.stores.base import check_key
from ronde.stores.etcd_gateway import Message

__all__ = ["EtcdKeys", "b64", "count_entries", "range_end"]


class EtcdKeys:
    """The names of a store with this prefix. Raises UsageError for keys and queues outside the limits."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode() + b"/"

    def key(self, key: str) -> str:
        return b64(self._prefix + b"k/" + check_key(key))

    def queue(self, queue: str) -> str:
        """Return the prefix of the queue's values. Two zero bytes end the name; a zero within it becomes 0, 255."""
        return b64(self._queue(queue))

    def item(self, queue: str, client: bytes, number: int) -> str:
        """Return a unique name for a value in the queue."""
        return b64(self._queue(queue) + client + b"%d" % number)

    def counter(self, client: bytes) -> str:
        return b64(self._prefix + b"c/" + client)

    def prefixes(self, prefix: bytes) -> tuple[str, str]:
        """Return the prefixes in etcd of the keys and the queues with this prefix."""
        return b64(self._prefix + b"k/" + prefix), b64(self._prefix + b"q/" + _escaped(prefix))

    def count_operations(self, prefix: bytes) -> list[Message]:
        """Return the operations whose answers `count_entries` takes."""
        keys, queues = self.prefixes(prefix)
        return [
            {"request_range": {"key": keys, "range_end": range_end(keys), "count_only": True}},
            {"request_range": {"key": queues, "range_end": range_end(queues), "keys_only": True}},
        ]

    def _queue(self, queue: str) -> bytes:
        return self._prefix + b"q/" + _escaped(check_key(queue)) + b"\0\0"


def count_entries(answer: Message) -> int:
    """Return the number of keys and queues in the answer to `count_operations`."""
    keys, queues = (response["response_range"] for response in answer["responses"][:2])
    names = {b64decode(item["key"]).rpartition(b"\0\0")[0] for item in queues.get("kvs", ())}
    return int(keys.get("count", 0)) + len(names)


def b64(text: bytes) -> str:
    return b64encode(text).decode()


def range_end(name: str) -> str:
    """Return the end of the range of names that begin with this one."""
    text = b64decode(name).rstrip(b"\xff")
    return b64(text[:-1] + bytes([text[-1] + 1]))


def _escaped(name: bytes) -> bytes:
    return name.replace(b"\0", b"\0\xff")
