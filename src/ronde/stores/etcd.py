"""A store in an etcd cluster, which does not depend on one node.

The rules:
  1. Keys, queues and a counter for each client have separate names: under the store's prefix, `k/` has keys, `q/`
     queues and `c/` counters. The values of a queue are keys in the order of their creation.
  2. Every change is one transaction, which also increments the client's counter, and succeeds only if the counter has
     the number that the client knows. So a change whose answer was lost can be sent again, to any member of the
     cluster: it happens once, and the client learns whether it had happened before.
  3. A change that depends on a value reads it first; the transaction checks that it is unchanged, or the change is
     tried again.
  4. A waiting client reads, and then watches from the next revision on, so it misses nothing and does not poll.
  5. Held keys have a lease, which a separate thread keeps alive. If the lease runs out (etcd out of reach for too
     long), the thread takes a new one and holds the keys again.
  6. All names and values are in base64, as the gateway expects them.

Every process that reaches etcd can read and write everything: only etcd's TLS with client certificates protects a job.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ronde.errors import PeerError, PeerLostError, UsageError
from ronde.stores.etcd_gateway import Gateway, Message, Refusal, WatchStream, parse_endpoints
from ronde.stores.store import check_key, check_value, key_list, missing_keys_error, missing_of
from ronde.stores.table import Table

__all__ = ["EtcdStore"]

ANSWER_NS = 20 * 10**9  # how long a cluster may be out of reach
CLOSE_NS = 2 * 10**9
LEASE_NS = 5 * 10**9
RENEWALS = 3  # of a lease, in its time
MOST_KEYS_AT_ONCE = 127  # etcd's --max-txn-ops is 128, and one is the counter
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
UNKNOWN_LEASE, COMPACTED = 5, 11  # gRPC's NOT_FOUND and OUT_OF_RANGE

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Found:
    """An existing key: its value, the revision that last changed it, and whether a client holds it."""

    value: bytes
    revision: str
    held: bool

    @classmethod
    def of(cls, message: Message) -> _Found:
        return cls(b64decode(message.get("value", "")), message["mod_revision"], "lease" in message)


class EtcdStore:
    """The `Store` under `prefix` in the etcd (3.4 or later) whose members answer at `endpoints`.

    `endpoints`: `host:port`, `http://host:port` or `https://host:port`, the latter with the files for TLS; give all
    members, because the store goes on with the others when one dies. `lease_ns`: how long held keys stay after this
    process has died; etcd counts whole seconds, and grants no less than 2. `patience_ns`: how long the cluster may be
    out of reach. Tries to connect for `timeout_ns`; raises TimeoutError with the last reason, or UsageError. In a
    forked child the object is another client, without the held keys of its parent.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        prefix: str,
        timeout_ns: int,
        *,
        lease_ns: int = LEASE_NS,
        patience_ns: int = ANSWER_NS,
        ca_file: str = "",
        certificate_file: str = "",
        key_file: str = "",
    ) -> None:
        self._endpoints = parse_endpoints(endpoints, ca_file, certificate_file, key_file)
        check_key(prefix)
        self._prefix = prefix
        self._names = EtcdKeys(prefix)
        self._lease_ns = lease_ns
        self._patience_ns = patience_ns
        self._open_client()
        try:
            self._gateway.wait_for_cluster(timeout_ns)
        except Refusal as refusal:
            raise UsageError(f"etcd at {self._endpoints} refuses this client: {refusal}") from None

    def _open_client(self) -> None:
        self._lock = threading.Lock()  # one call at a time
        self._gateway = Gateway(self._endpoints, self._patience_ns)
        self._pid = os.getpid()
        self._closing = self._gateway.is_giving_up
        self._closed = False
        self._count = 0
        self._client = secrets.token_hex(8).encode()
        self._counter = self._names.counter(self._client)
        self._items = itertools.count()
        self._stream: WatchStream | None = None
        self._lease: EtcdLease | None = None

    @property
    def address(self) -> str:
        return f"etcd:{self._endpoints}/{self._prefix}"

    def set(self, key: str, value: bytes) -> None:
        values = {self._names.key(key): check_value(key, value)}
        self._run(lambda: self._put_all(values))

    def get(self, key: str, timeout_ns: int) -> bytes:
        return self._multi_get([key], timeout_ns)[0]

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        missing = {self._names.key(key): key for key in key_list(keys)}

        def query() -> tuple[bool | None, int]:
            found, revision = self._read(missing, values=False)
            for name in found:
                del missing[name]
            return not missing or None, revision

        if not self._wait_until(query, lambda: [(name, "") for name in missing], timeout_ns):
            raise missing_keys_error(missing.values(), self.address, timeout_ns)

    def add(self, key: str, amount: int) -> int:
        return self._change_value(key, lambda table, name: table.add(name, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        expected, desired = check_value(key, expected), check_value(key, desired)
        return self._change_value(key, lambda table, name: table.compare_set(name, expected, desired))

    def append(self, key: str, value: bytes) -> None:
        value = check_value(key, value)
        self._change_value(key, lambda table, name: table.append(name, value))

    def delete_key(self, key: str) -> bool:
        name = self._names.key(key)

        def delete() -> bool:
            while found := self._read([name])[0].get(name):
                if self._commit([_unchanged(name, found)], [{"request_delete_range": {"key": name}}]):
                    if self._lease:
                        self._lease.drop_keys([name])
                    return True
            return False

        return self._run(delete)

    def check(self, keys: Sequence[str]) -> bool:
        names = {self._names.key(key) for key in key_list(keys)}
        return self._run(lambda: len(self._read(names, values=False)[0]) == len(names))

    def num_keys(self) -> int:
        return self._run(
            lambda: count_entries(
                self._gateway.post("kv/txn", {"success": self._names.count_operations(b"")})
            )
        )

    def multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        return self._multi_get(key_list(keys), timeout_ns) if keys else []

    def multi_set(self, values: Mapping[str, bytes]) -> None:
        if len(values) > MOST_KEYS_AT_ONCE:
            raise UsageError(f"etcd sets at most {MOST_KEYS_AT_ONCE} keys at one moment, not {len(values)}")
        named = {self._names.key(key): check_value(key, value) for key, value in values.items()}
        if named:
            self._run(lambda: self._put_all(named))

    def delete_prefix(self, prefix: str) -> int:
        encoded = check_key(prefix)
        keys, queues = self._names.prefixes(encoded)
        counts = self._names.count_operations(encoded)
        deletions = [
            {"request_delete_range": {"key": name, "range_end": range_end(name)}} for name in (keys, queues)
        ]

        def delete() -> int:
            answer = self._commit([], [*counts, *deletions])
            if answer is None:
                raise AssertionError("nothing was compared")
            if "responses" not in answer:  # the answer was lost, but etcd still has the revision before
                before = {"revision": str(int(answer["header"]["revision"]) - 1)}
                counted = [{"request_range": {**count["request_range"], **before}} for count in counts]
                answer = self._gateway.post("kv/txn", {"success": counted})
            if self._lease:
                gone = b64decode(keys)
                self._lease.drop_keys(
                    [name for name in self._lease.kept_names() if b64decode(name).startswith(gone)]
                )
            return count_entries(answer)

        return self._run(delete)

    # Queues

    def queue_push(self, queue: str, value: bytes) -> None:
        name = self._names.item(queue, self._client, next(self._items))
        value = check_value(queue, value)
        self._run(lambda: self._commit([], [{"request_put": {"key": name, "value": b64(value)}}]))

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        first = self._names.queue(queue)
        request = {"key": first, "range_end": range_end(first), "limit": "1", "sort_target": "CREATE"}
        request["sort_order"] = "ASCEND"

        def pop() -> tuple[bytes | None, int]:
            while True:
                answer = self._gateway.post("kv/range", request)
                if "kvs" not in answer:
                    return None, int(answer["header"]["revision"])
                item = answer["kvs"][0]
                deletion: Message = {"request_delete_range": {"key": item["key"]}}
                if self._commit([_unchanged(item["key"], _Found.of(item))], [deletion]):
                    return b64decode(item.get("value", "")), 0

        value = self._wait_until(pop, lambda: [(first, range_end(first))], timeout_ns)
        if value is None:
            raise missing_keys_error(queue, self.address, timeout_ns)
        return value

    def queue_len(self, queue: str) -> int:
        first = self._names.queue(queue)
        request = {"key": first, "range_end": range_end(first), "count_only": True}
        return self._run(lambda: int(self._gateway.post("kv/range", request).get("count", 0)))

    # Watched and held keys

    def watch(self, known: Mapping[str, bytes | None], timeout_ns: int) -> dict[str, bytes | None]:
        names = {self._names.key(key): key for key in known}

        def query() -> tuple[dict[str, bytes | None] | None, int]:
            found, revision = self._read(names)
            values = {key: found[name].value if name in found else None for name, key in names.items()}
            return {key: value for key, value in values.items() if value != known[key]} or None, revision

        return self._wait_until(query, lambda: [(name, "") for name in names], timeout_ns) or {}

    def hold(self, key: str, value: bytes) -> None:
        name, value = self._names.key(key), check_value(key, value)

        def hold() -> None:
            if not self._lease:
                self._lease = EtcdLease(Gateway(self._endpoints, self._patience_ns), self._lease_ns)
            while True:
                put = {"key": name, "value": b64(value), "lease": self._lease.number}
                try:
                    self._commit([], [{"request_put": put}])
                    break
                except Refusal as refusal:
                    if refusal.code != UNKNOWN_LEASE:
                        raise
                    self._lease.renew_now()  # it has run out, unnoticed by its thread
            self._lease.keep_key(name, put)

        self._run(hold)

    def fork(self) -> EtcdStore:
        self._run(lambda: None)  # raises if closed
        other = object.__new__(EtcdStore)
        other._endpoints, other._prefix, other._names = self._endpoints, self._prefix, self._names
        other._lease_ns, other._patience_ns = self._lease_ns, self._patience_ns
        other._open_client()
        return other

    def close(self) -> None:
        self._notice_fork()
        self._closing.set()
        stream = self._stream
        if stream:
            stream.hang_up()  # wakes the thread that waits
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._close_stream()
            try:
                if self._lease:
                    self._lease.close(CLOSE_NS)
                if self._count:
                    with suppress(PeerError, Refusal):  # without etcd the counter does not matter
                        self._gateway.post("kv/deleterange", {"key": self._counter}, CLOSE_NS)
            finally:
                self._gateway.hang_up()

    def _notice_fork(self) -> None:
        """Start over in a forked child: the connections, the counter and the held keys are the parent's."""
        if os.getpid() == self._pid:
            return
        self._gateway.hang_up()
        self._close_stream()
        if self._lease:
            self._lease.abandon()
        was_closed = self._closed
        self._open_client()
        if was_closed:
            self._closed = True
            self._closing.set()

    # One call

    def _run(self, call: Callable[[], Answer]) -> Answer:
        self._notice_fork()
        with self._lock:
            self._check_open()
            try:
                return call()
            except Refusal as refusal:
                raise UsageError(f"etcd at {self._endpoints} refused this: {refusal}") from None
            except PeerLostError:
                self._check_open()
                raise

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise UsageError(f"this client of the store at {self.address} has been closed")

    def _multi_get(self, keys: Sequence[str], timeout_ns: int) -> list[bytes]:
        names = {self._names.key(key): None for key in keys}

        def query() -> tuple[dict[str, _Found] | None, int]:
            found, revision = self._read(names)
            return found if len(found) == len(names) else None, revision

        found = self._wait_until(query, lambda: [(name, "") for name in names], timeout_ns)
        if found is None:
            raise missing_keys_error(missing_of(keys, self.check), self.address, timeout_ns)
        return [found[self._names.key(key)].value for key in keys]

    def _change_value(self, key: str, operate: Callable[[Table, bytes], Answer]) -> Answer:
        """Change the value of one key as a table does."""
        name, encoded = self._names.key(key), check_key(key)

        def attempt() -> Answer:
            while True:
                found = self._read([name])[0].get(name)
                table = Table()
                if found:
                    table.set(encoded, found.value)
                answer = operate(table, encoded)
                value = table.get(encoded)
                if value is None or (found and value == found.value):
                    return answer
                put = {"key": name, "value": b64(value), "ignore_lease": bool(found and found.held)}
                if self._commit([_unchanged(name, found)], [{"request_put": put}]):
                    return answer

        return self._run(attempt)

    def _put_all(self, values: Mapping[str, bytes]) -> None:
        """Set the keys; held keys stay held."""
        held: set[str] = set()
        while not self._commit(
            [
                {
                    "key": name,
                    "target": "LEASE",
                    "result": "GREATER" if name in held else "EQUAL",
                    "lease": "0",
                }
                for name in values
            ],
            [
                {"request_put": {"key": name, "value": b64(value), "ignore_lease": name in held}}
                for name, value in values.items()
            ],
        ):
            held = {name for name, found in self._read(values, values=False)[0].items() if found.held}

    def _commit(self, compare: list[Message], operations: list[Message]) -> Message | None:
        """Carry out the operations once, if the comparisons hold; return the answer, or None if they do not hold.

        An answer without "responses" has the revision of a transaction that succeeded before the connection broke.
        """
        known = {"key": self._counter} | (
            {"target": "VALUE", "value": b64(b"%d" % self._count)}
            if self._count
            else {"target": "CREATE", "create_revision": "0"}
        )
        count = {"request_put": {"key": self._counter, "value": b64(b"%d" % (self._count + 1))}}
        answer = self._gateway.post(
            "kv/txn",
            {
                "compare": [known, *compare],
                "success": [*operations, count],
                "failure": [{"request_range": {"key": self._counter}}],
            },
        )
        if answer.get("succeeded"):
            self._count += 1
            return answer
        counters = answer["responses"][0]["response_range"].get("kvs", [])
        number = int(b64decode(counters[0]["value"])) if counters else 0
        if number == self._count:
            return None
        if number == self._count + 1:
            self._count += 1
            return {"header": {"revision": counters[0]["mod_revision"]}}
        self._count = 0
        self._client = secrets.token_hex(8).encode()
        self._counter = self._names.counter(self._client)
        raise PeerLostError(
            f"the store at {self.address} has lost all its keys: another client has deleted them"
        )

    def _read(self, names: Iterable[str], values: bool = True) -> tuple[dict[str, _Found], int]:
        """Return the existing ones of the keys, all at one revision, and that revision."""
        names = list(names)
        found: dict[str, _Found] = {}
        revision = "0"
        for start in range(0, max(1, len(names)), MOST_KEYS_AT_ONCE):
            ranges = [
                {"request_range": {"key": name, "keys_only": not values, "revision": revision}}
                for name in names[start : start + MOST_KEYS_AT_ONCE]
            ]
            try:
                answer = self._gateway.post("kv/txn", {"success": ranges})
            except Refusal as refusal:
                if refusal.code == COMPACTED and revision != "0":
                    return self._read(names, values)
                raise
            if revision == "0":
                revision = answer["header"]["revision"]
            for response in answer.get("responses", ()):
                for message in response["response_range"].get("kvs", ()):
                    found[message["key"]] = _Found.of(message)
        return found, int(revision)

    def _wait_until(
        self,
        query: Callable[[], tuple[Answer | None, int]],
        ranges: Callable[[], list[tuple[str, str]]],
        timeout_ns: int,
    ) -> Answer | None:
        """Return the result of the query as soon as it is not None, or None after the timeout.

        `query` returns a result and its revision; `ranges`, the keys that the result depends on.
        """

        def wait() -> Answer | None:
            deadline_ns = time.monotonic_ns() + timeout_ns
            pause_s = FIRST_PAUSE_S
            while True:
                found, revision = query()
                if found is not None or time.monotonic_ns() >= deadline_ns:
                    return found
                watched = ranges()
                if not watched:
                    self._closing.wait(max(0, deadline_ns - time.monotonic_ns()) / 1e9)
                    self._check_open()
                    continue
                try:
                    stream = self._watch_from(watched, revision)
                    self._check_open()  # `close` hangs up only a stream that it sees
                    stream.wait(revision, deadline_ns)
                    pause_s = FIRST_PAUSE_S
                except OSError:  # query again, perhaps another member
                    self._close_stream()
                    self._closing.wait(pause_s)
                    self._check_open()
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

        return self._run(wait)

    def _watch_from(self, ranges: list[tuple[str, str]], revision: int) -> WatchStream:
        """Return a stream of changes after the revision: the present stream if it watches the same keys."""
        if not self._stream or self._stream.ranges != frozenset(ranges):
            self._close_stream()
            self._stream = WatchStream(self._gateway, ranges, revision + 1)
        return self._stream

    def _close_stream(self) -> None:
        if self._stream:
            self._stream.close()
            self._stream = None


def _unchanged(name: str, found: _Found | None) -> Message:
    return {"key": name, "target": "MOD", "mod_revision": found.revision if found else "0"}


# Held keys


class EtcdLease:
    """A lease of about `ttl_ns`; takes over the gateway. Raises PeerLostError or Refusal if etcd grants none."""

    def __init__(self, gateway: Gateway, ttl_ns: int) -> None:
        self._gateway = gateway
        self._ttl_ns = ttl_ns
        self._kept: dict[str, Message] = {}
        self._lock = threading.Lock()  # guards the lease, its keys and the gateway
        self._ended = threading.Event()
        self.number = ""
        self._granted_s = 0.0
        self._grant_lease()
        self._thread = threading.Thread(target=self._run, name="ronde-etcd-lease", daemon=True)
        self._thread.start()

    def keep_key(self, name: str, put: Message) -> None:
        """Repeat this put whenever the lease has run out."""
        with self._lock:
            self._kept[name] = put
            if put["lease"] != self.number:  # the lease has run out since the put
                self._hold_keys()

    def kept_names(self) -> list[str]:
        """Return the names of the kept keys."""
        with self._lock:
            return list(self._kept)

    def drop_keys(self, names: Iterable[str]) -> None:
        """Stop keeping these keys."""
        with self._lock:
            for name in names:
                self._kept.pop(name, None)

    def renew_now(self) -> None:
        """Renew the lease, or take a new one. Raises PeerLostError."""
        with self._lock:
            self._renew()

    def close(self, timeout_ns: int) -> None:
        """Revoke the lease, which deletes its keys."""
        self._ended.set()
        self._thread.join()
        with suppress(PeerError, Refusal):  # otherwise the lease runs out
            self._gateway.post("lease/revoke", {"ID": self.number}, timeout_ns)
        self._gateway.hang_up()

    def abandon(self) -> None:
        """Close the connection in a forked child; the lease is the parent's."""
        self._gateway.hang_up()

    def _run(self) -> None:
        while not self._ended.wait(self._granted_s / RENEWALS):
            try:
                with self._lock:
                    self._renew(int(self._granted_s * 1e9 / RENEWALS))
            except Exception as error:
                # Any error: without this thread, the others take this process for dead.
                _log.info("cannot keep alive what this process holds in etcd: %s", error)

    def _renew(self, timeout_ns: int | None = None) -> None:
        answer = self._gateway.post("lease/keepalive", {"ID": self.number}, timeout_ns)
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            return
        _log.info("etcd was out of reach for longer than a lease; holding %d keys again", len(self._kept))
        self._grant_lease(timeout_ns)
        self._hold_keys(timeout_ns)

    def _grant_lease(self, timeout_ns: int | None = None) -> None:
        seconds = max(1, -(-self._ttl_ns // 10**9))
        answer = self._gateway.post("lease/grant", {"TTL": str(seconds)}, timeout_ns)
        self.number, self._granted_s = answer["ID"], float(answer["TTL"])

    def _hold_keys(self, timeout_ns: int | None = None) -> None:
        for put in self._kept.values():
            put["lease"] = self.number
            self._gateway.post("kv/put", put, timeout_ns)


# Names in etcd


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
