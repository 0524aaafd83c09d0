"""One connection to a store for a rendezvous: the threads that do, watch and take what the machine wants.

Each has one thing to wait for, and a client of the store of its own. To wake one, we change what it waits for: a key
that only this node has, or a message without meaning. The first client holds the node's key, so it is closed last.

A thread that ends by any error whatever loses the store: nobody else waits for what it waited for.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

from ronde.core.rendezvous.effects import (
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
from ronde.core.rendezvous.state import STATE
from ronde.errors import RondeError, TimeoutError, UsageError
from ronde.net.stores.base import Store

__all__ = ["MOVED", "StoreSession"]

MOVED = "moved"  # a key that says where the nodes meet instead: who holds it is there
NOTHING = b"{}"  # a message that nobody understands, to wake who waits for one
LONGEST_WAIT_NS = 5 * 10**9  # a store that loses its memory may lose what was to wake us

_log = logging.getLogger(__name__)
_sessions = itertools.count()  # so far, of this process


class StoreSession:
    """What is done with one store. `tell` hears what has happened, `lose`, once or more often, that it is over, and
    `follow` that the nodes meet elsewhere.
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
        # The key by which this node wakes its own watch. That of an earlier session may still be there, for the store
        # need not have noticed that it is over; and to set it to what it is would wake nobody.
        self.wake_key = f"wake/{node}/{next(_sessions)}"
        self.is_over = False
        self._on_event = on_event
        self._on_loss = on_loss
        self._on_moved = on_moved
        self._operations: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._watcher = _Watcher(self)
        self._popper = _Popper(self)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._forks: list[Store] = []
        try:
            self._start_thread(self._operate, "operator")
            self._start_thread(self._watcher.run, "watcher")
        except BaseException:  # this process may get no more threads
            self.close()
            raise

    def perform(self, effect: Effect) -> None:
        """Have it done, after everything before it."""
        match effect:
            case Watch(known):
                self._watcher.watch_keys(known)
                self._operations.put(Hold(self.wake_key, b"%d" % self._watcher.count))
            case Pop(inbox):
                before, must_start = self._popper.take_from(inbox)
                if before:
                    self._operations.put(Push(before, NOTHING))
                if must_start:
                    self._start_thread(self._popper.run, "inbox")
            case _:
                self._operations.put(effect)

    def finish(self, deadline_ns: int) -> bool:
        """Do what is still to be done, until the deadline. Returns whether that was possible; then comes `close`."""
        self._operations.put(None)
        for thread in self._threads:
            thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Let go of the store: others see that this node is gone. What is under way fails, and the threads end."""
        with self._lock:
            self.is_over = True
        self._operations.put(None)
        for store in [*self._forks, self.store]:
            store.close()

    def fork(self) -> Store:
        """Return a client for one of the threads, which ends with the session."""
        store = self.store.fork()
        with self._lock:
            if not self.is_over:
                self._forks.append(store)
                return store
        store.close()
        raise UsageError("the session is over")

    def report_event(self, event: Event) -> None:
        """Something has happened; called by the threads."""
        self._on_event(self, event)

    def report_moved(self, address: str) -> None:
        """The nodes meet elsewhere; called by the threads."""
        self._on_moved(self, address)

    def report_loss(self, error: Exception) -> None:
        """It cannot go on; called by the threads."""
        if self.is_over:
            return
        if not isinstance(error, RondeError):
            _log.error("a thread of the rendezvous has failed", exc_info=error)
        self._on_loss(self, error)

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"ronde-rendezvous-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)  # only now, for this process may get no more

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
        """Our own threads, so that they see that it is over."""
        self._watcher.stop()
        self.store.set(self.wake_key, b"over")
        if before := self._popper.take_from(None)[0]:
            self.store.queue_push(before, NOTHING)
        for thread in self._threads[1:]:
            thread.join()
        self.store.delete_key(self.wake_key)


def _carry_out(store: Store, effect: Effect) -> Event | None:
    """Do it; return what comes of it."""
    match effect:
        case Set(values):
            if len(values) == 1:
                ((key, value),) = values.items()
                store.set(key, value)
            else:
                for key, value in values.items():  # together they may be too large
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
    """The thread that watches."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._wanted: Mapping[str, bytes | None] = {}
        self._is_over = False
        self.count = 0

    def watch_keys(self, known: Mapping[str, bytes | None]) -> None:
        """Watch these from now on, once the wake_key has been rung with our count."""
        with self._lock:
            self._wanted = known
            self.count += 1

    def stop(self) -> None:
        """It is over, once the wake_key has been rung."""
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
        wake_key: dict[str, bytes | None] = {self._session.wake_key: None, MOVED: None}
        count = followed_ns = 0
        while not self._is_over:
            with self._lock:
                if self.count != count:
                    known, count = dict(self._wanted), self.count
            changed = store.watch(known | wake_key, LONGEST_WAIT_NS)
            wake_key |= {key: value for key, value in changed.items() if key in wake_key}
            address, now_ns = wake_key[MOVED], time.monotonic_ns()
            if address and (MOVED in changed or now_ns - followed_ns >= LONGEST_WAIT_NS):
                followed_ns = now_ns  # who does not get in there tries again
                self._session.report_moved(address.decode())
            news = {key: value for key, value in changed.items() if key in known}
            known |= news
            if news:
                self._session.report_event(Changes({}, news))


class _Popper:
    """The thread that takes messages out of the leader's inbox."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._inbox: str | None = None
        self._is_running = False

    def take_from(self, inbox: str | None) -> tuple[str | None, bool]:
        """Take from this queue from now on, from none if it is None.

        Returns the one that the thread may be waiting for, and must be woken of, and whether to start a thread.
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
        if value != NOTHING:
            self._session.report_event(Popped(inbox, (value,)))
