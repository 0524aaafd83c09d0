"""Calls of functions in workers that stay between calls: a store in the caller's process takes them there and back.

Keys of the store, where NUMBER counts the calls from 1:

    call/NUMBER           a call, for all workers; the last one to read it deletes it
    read/NUMBER           how many workers have read it
    result/NUMBER/RANK    what it returned in one of them; number 0: the worker is ready
    ending/RANK           the worker has done all calls, and ends
    end                   the error after which no more results come

The first call that fails in a worker ends this worker, and so the job. The driver's error says why.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ronde.environment import environment
from ronde.errors import PeerLostError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.launch.calls import pickler
from ronde.launch.driver.job_store import serve_store, tcp_addresses
from ronde.stores.store import Store, delete_large, get_large, put_large
from ronde.stores.tcp import StoreClient

__all__ = ["INTERRUPTED", "SHUT_DOWN", "CallLine", "CallServer", "WorkerCall", "fetch_result", "serve_calls"]

CONNECT_NS = 30 * 10**9
FOREVER_NS = 10**17  # three years
END = "end"
SHUT_DOWN = "the RayExecutor was shut down before the call ended: take its results before shutdown()"
INTERRUPTED = "the RayExecutor was interrupted, which has ended its workers: call start() for new ones"


@dataclass(frozen=True)
class CallLine:
    """How workers and Ray tasks reach the calls. It can be pickled, and its `repr` leaves the key out."""

    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    is_secret: bool

    def open(self) -> StoreClient:
        """Return a client of the store."""
        return StoreClient(",".join(self.addresses), JobKey(self.key), CONNECT_NS, is_secret=self.is_secret)


@dataclass(frozen=True)
class WorkerCall:
    """A call of `fn`. `takes_executable`: with the worker's executable alone. `rank`: in this worker; None: in all."""

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes_executable: bool = False
    rank: int | None = None


class CallServer:
    """The caller's end."""

    def __init__(self, reachable: Sequence[str], listening: Sequence[str], is_secret: bool) -> None:
        key = JobKey.generate()
        self._server = serve_store(listening, key, is_secret)
        addresses = tcp_addresses(reachable, self._server.address)
        self.line = CallLine(addresses, bytes.fromhex(key.hex()), is_secret)
        self._store = self.line.open()
        self._count = 0
        self._lock = threading.Lock()
        self._end: RondeError | None = None

    def call(self, call: WorkerCall | None) -> int:
        """Send a call to the workers, None to let them end; return its number. Raises UsageError."""
        if call is not None and not callable(call.fn):
            raise UsageError(f"{call.fn!r} cannot be called: give the function that the workers call")
        try:
            packed = pickler().dumps(call)
        except Exception as error:
            raise UsageError(
                f"the function and its arguments cannot be sent to workers: {type(error).__name__}: {error}"
            ) from None
        self._count += 1
        put_large(self._store, f"call/{self._count}", packed)
        return self._count

    def results(self, number: int, ranks: Sequence[int]) -> list[Any]:
        """Return the results of a call in these workers. Raises the error of the job."""
        try:
            with closing(self._store.fork()) as store:  # another thread may set the end
                return [_fetch(store, number, rank) for rank in ranks]
        except RondeError:
            if self._end is None:
                raise
            raise self._end from None  # also if `close` came before the answer of the store

    def are_ending(self, ranks: Sequence[int], within_ns: int) -> bool:
        """Return whether these workers have done all calls within the time, after the call that lets them end."""
        try:
            self._store.wait([f"ending/{rank}" for rank in ranks], within_ns)
        except TimeoutError:
            return False
        return True

    def end(self, error: RondeError) -> None:
        """Let every wait for results raise this error, unless there is one already."""
        with self._lock:
            if self._end is None:
                self._end = error
                put_large(self._store, END, pickle.dumps(error))

    def close(self) -> None:
        """Stop serving."""
        self._store.close()
        self._server.close()


def fetch_result(line: CallLine, number: int, rank: int) -> Any:
    """Return the result of a call in one worker, in any process."""
    try:
        store = line.open()
    except TimeoutError as error:  # Ray may start this task after the executor has closed its store
        raise RondeError(f"{SHUT_DOWN} (if it still runs, this task cannot reach it: {error})") from None
    try:
        with closing(store):
            return _fetch(store, number, rank)
    except PeerLostError:
        raise RondeError(SHUT_DOWN) from None


def serve_calls(line: CallLine, make_executable: Callable[[], Any]) -> None:
    """Do all calls in a worker, one after the other, until the one that ends it."""
    variables = environment()
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    executable = make_executable()
    with closing(line.open()) as store:
        _send(store, 0, rank, None)
        number = 1
        while (call := _next_call(store, number, size)) is not None:
            if call.rank is None or call.rank == rank:
                args = (executable,) if call.takes_executable else call.args
                _send(store, number, rank, call.fn(*args, **call.kwargs))
            number += 1
        store.set(f"ending/{rank}", b"")


def _next_call(store: Store, number: int, size: int) -> WorkerCall | None:
    packed = b"".join(get_large(store, f"call/{number}", FOREVER_NS))
    if store.add(f"read/{number}", 1) == size:
        delete_large(store, f"call/{number}")
        store.delete_key(f"read/{number}")
    call: WorkerCall | None = pickle.loads(packed)
    return call


def _send(store: Store, number: int, rank: int, result: Any) -> None:
    try:
        packed = pickler().dumps(result)
    except Exception as error:
        where = f"the result, of type {type(result).__qualname__}, cannot be sent to the caller"
        raise TypeError(f"{where}: {type(error).__name__}: {error}") from error
    put_large(store, f"result/{number}/{rank}", packed)


def _fetch(store: Store, number: int, rank: int) -> Any:
    key = f"result/{number}/{rank}"
    if key not in store.watch({key: None, END: None}, FOREVER_NS):
        raise pickle.loads(b"".join(get_large(store, END, 0)))
    packed = b"".join(get_large(store, key, 0))
    delete_large(store, key)
    return pickle.loads(packed)
