"""A session with a store for a rendezvous: three threads carry out, watch and pop for the machine.

Each thread waits for one thing, with a separate client of the store. To wake a thread, the session changes what it
waits for: a key that only this node has, or an empty message. The first client holds the node's keys, so it is closed
last.

A thread that ends with any error loses the store, because no other thread waits in its place.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ronde.errors import RondeError, TimeoutError, UsageError
from ronde.rendezvous.effects import (
    Changes,
    Compare,
    Compared,
    Delete,
    Effect,
    Event,
    FindChanges,
    Forget,
    Hold,
    Pop,
    Popped,
    Push,
    Set,
    Stored,
    Watch,
)
from ronde.rendezvous.state import STATE
from ronde.stores.store import Store

__all__ = ["MOVED_KEY", "StoreSession"]

MOVED_KEY = "moved"  # a key with the address where the nodes meet instead; a node that is there holds it
WAKE_MESSAGE = b"{}"  # a message without meaning, which wakes the thread that pops
LONGEST_WAIT_NS = 5 * 10**9  # a store that loses its data may lose the change that wakes a thread

_log = logging.getLogger(__name__)
_sessions = itertools.count()  # of this process


class StoreSession:
    """A session with one store.

    Its threads call `on_event` with events, `on_moved` with an address when the nodes meet elsewhere, and `on_loss`
    with an error, perhaps repeatedly, when the store is lost.
    """

    def __init__(
        self,
        store: Store,
        node: str,
        on_event: Callable[[StoreSession, Event], None],
        on_loss: Callable[[StoreSession, Exception], None],
        on_moved: Callable[[StoreSession, str], None],
    ) -> None:
        self.store = store
        # The key that wakes this node's watch. The store may still hold the key of an earlier session whose end it has
        # not noticed, and setting that to the value that it has would wake no thread. So every session has another key.
        self.wake_key = f"wake/{node}/{next(_sessions)}"
        self.is_over = False
        self.report_event = partial(on_event, self)
        self.report_moved = partial(on_moved, self)
        self._on_loss = on_loss
        self._operations: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._watcher = _Watcher(self)
        self._popper = _Popper(self)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._forks: list[Store] = []
        try:
            self._start_thread(self._operate, "operator")
            self._start_thread(self._watcher.run, "watcher")
        except BaseException:  # the system may refuse another thread
            self.close()
            raise

    def perform(self, effect: Effect) -> None:
        """Queue the effect behind all earlier ones."""
        match effect:
            case Watch(known):
                self._watcher.watch_keys(known)
                self._operations.put(Hold(self.wake_key, b"%d" % self._watcher.count))
            case Pop(inbox):
                before, must_start = self._popper.take_from(inbox)
                if before:
                    self._operations.put(Push(before, WAKE_MESSAGE))
                if must_start:
                    self._start_thread(self._popper.run, "inbox")
            case _:
                self._operations.put(effect)

    def finish(self, deadline_ns: int) -> bool:
        """Carry out all queued effects before the deadline; return whether that was possible. Call `close` next."""
        self._operations.put(None)
        for thread in self._threads:
            thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Close all clients: the others see that this node is gone, pending operations fail, and the threads end."""
        with self._lock:
            self.is_over = True
        self._operations.put(None)
        for store in [*self._forks, self.store]:
            store.close()

    def fork(self) -> Store:
        """Return another client, for one of the threads; it is closed with the session."""
        store = self.store.fork()
        with self._lock:
            if not self.is_over:
                self._forks.append(store)
                return store
        store.close()
        raise UsageError("the session is over")

    def report_loss(self, error: Exception) -> None:
        """Report that the session cannot go on; called by the threads."""
        if self.is_over:
            return
        if not isinstance(error, RondeError):
            _log.error("a thread of the rendezvous has failed", exc_info=error)
        self._on_loss(self, error)

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"ronde-rendezvous-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)  # after the start, which may fail

    def _operate(self) -> None:
        try:
            while (effect := self._operations.get()) is not None and not self.is_over:
                if (event := _carry_out(self.store, effect)) is not None:
                    self.report_event(event)
            if not self.is_over:
                self._wake_threads()
        except Exception as error:
            self.report_loss(error)

    def _wake_threads(self) -> None:
        """Wake the other threads, so that they end."""
        self._watcher.stop()
        self.store.set(self.wake_key, b"over")
        if before := self._popper.take_from(None)[0]:
            self.store.queue_push(before, WAKE_MESSAGE)
        for thread in self._threads[1:]:
            thread.join()
        self.store.delete_key(self.wake_key)


def _carry_out(store: Store, effect: Effect) -> Event | None:
    """Carry out the effect; return the event that answers it, if there is one."""
    match effect:
        case Set(values):
            if len(values) == 1:
                ((key, value),) = values.items()
                store.set(key, value)
            else:
                for key, value in values.items():  # one request for all may be too large
                    store.set(key, value)
            return Stored(values)
        case Hold(key, value):
            store.hold(key, value)
        case Push(inbox, value):
            store.queue_push(inbox, value)
        case Compare(expected, desired):
            return Compared(store.compare_set(STATE, expected, desired))
        case FindChanges(known):
            return Changes(known, store.watch(known, 0))
        case Forget(prefix):
            store.delete_prefix(prefix)
        case Delete(keys):
            for key in keys:
                store.delete_key(key)
    return None


class _Watcher:
    """The thread that watches keys. `count`: how often the set of keys has changed."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._wanted: Mapping[str, bytes | None] = {}
        self._is_over = False
        self.count = 0

    def watch_keys(self, known: Mapping[str, bytes | None]) -> None:
        """Watch these keys instead, as soon as the wake key is set to `count`."""
        with self._lock:
            self._wanted = known
            self.count += 1

    def stop(self) -> None:
        """End, as soon as the wake key changes."""
        self._is_over = True

    def run(self) -> None:
        store: Store | None = None
        try:
            store = self._session.fork()
            self._watch(store)
        except Exception as error:
            self._session.report_loss(error)
        finally:
            if store:
                store.close()

    def _watch(self, store: Store) -> None:
        known: dict[str, bytes | None] = {}
        wake_key: dict[str, bytes | None] = {self._session.wake_key: None, MOVED_KEY: None}
        count = followed_ns = 0
        while not self._is_over:
            with self._lock:
                if self.count != count:
                    known, count = dict(self._wanted), self.count
            changed = store.watch(known | wake_key, LONGEST_WAIT_NS)
            wake_key |= {key: value for key, value in changed.items() if key in wake_key}
            address, now_ns = wake_key[MOVED_KEY], time.monotonic_ns()
            if address and (MOVED_KEY in changed or now_ns - followed_ns >= LONGEST_WAIT_NS):
                followed_ns = now_ns  # and again later, in case this node cannot connect there now
                self._session.report_moved(address.decode())
            news = {key: value for key, value in changed.items() if key in known}
            known |= news
            if news:
                self._session.report_event(Changes({}, news))


class _Popper:
    """The thread that pops messages from the leader's inbox; it runs only while this node leads."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._inbox: str | None = None
        self._is_running = False

    def take_from(self, inbox: str | None) -> tuple[str | None, bool]:
        """Pop from this queue from now on; None: from no queue.

        Returns the queue at which the thread may be waiting, to be woken there, and whether to start a thread.
        """
        with self._lock:
            before, self._inbox = self._inbox, inbox
            must_start = inbox is not None and not self._is_running
            self._is_running = self._is_running or must_start
            return before, must_start

    def run(self) -> None:
        store: Store | None = None
        try:
            store = self._session.fork()
            while inbox := self._next_inbox():
                self._pop(store, inbox)
        except Exception as error:
            self._session.report_loss(error)
        finally:
            if store:
                store.close()

    def _next_inbox(self) -> str | None:
        with self._lock:
            self._is_running = self._inbox is not None
            return self._inbox

    def _pop(self, store: Store, inbox: str) -> None:
        try:
            value = store.queue_pop(inbox, LONGEST_WAIT_NS)
        except TimeoutError:
            return
        if value != WAKE_MESSAGE:
            self._session.report_event(Popped(inbox, (value,)))
