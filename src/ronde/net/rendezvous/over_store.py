"""The rendezvous of nodes that share a store: the shell of `core/rendezvous`.

Four threads at most, each with one thing to wait for. One steps the machine: it waits for news and for the machine's
clock, and never for the store. One does what the machine wants of the store, in order. One watches. On the leader, one
takes messages out of the inbox. The last two have clients of the store of their own; to wake them, we change what they
wait for: a key that only this node has, or a message without meaning.

The first of the clients holds the node's key: it must be closed last, and its loss is the node's death to the others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from ronde.core.rendezvous import Participant, Rules
from ronde.core.rendezvous_effects import (
    Compare,
    Compared,
    Effect,
    Event,
    Forget,
    Hold,
    Look,
    Pop,
    PopFailed,
    Popped,
    Push,
    Seen,
    Set,
    Stored,
    Tell,
    Tick,
    Watch,
)
from ronde.core.rendezvous_state import ALIVE, STATE, alive_key
from ronde.core.round import Budget, Failure, Node, Notice, RendezvousEvent
from ronde.errors import PeerError, RondeError, TimeoutError
from ronde.net.rendezvous.events import Events
from ronde.net.stores.base import Store

__all__ = ["NOTHING", "Entrance", "OverStore"]

NOTHING = b"{}"  # a message that nobody understands, to wake who waits for one
LONGEST_WAIT_NS = 60 * 10**9
CLOSE_NS = 3 * 10**9
CONNECT_NS = 10**9  # of one attempt, so that `close` need not wait longer
LEAST_NS = 10**8  # of the last one
REMEDY = "start the node that serves it, correct --rdzv-endpoint, or wait longer (--start-timeout)"

_log = logging.getLogger(__name__)


class Entrance(Protocol):
    """How to get to the store."""

    def enter(self, timeout_ns: int) -> Store:
        """Return a client. Raises TimeoutError if there is none yet, other errors of this package if never."""

    def close(self, others: Callable[[int], None]) -> None:
        """Let go of what was served here. `others` waits until the other nodes are gone, up to so many nanoseconds."""


class _Stopped(Exception):
    """The thread is not needed any more."""


class OverStore:
    """One node's part; see `base.Rendezvous`.

    `wish`: the group rank that is given to this node, -1 if none is. `start_timeout_ns`: how long the store may take.
    """

    def __init__(
        self, rules: Rules, entrance: Entrance, wish: int = -1, start_timeout_ns: int = 300 * 10**9
    ) -> None:
        self._rules = rules
        self._start_timeout_ns = min(start_timeout_ns, rules.join_timeout_ns)
        self._entrance = entrance
        self._wish = wish
        self._participant = Participant(rules)
        self._events = Events()
        self._news: queue.SimpleQueue[Callable[[], list[Effect]] | None] = queue.SimpleQueue()
        self._operations: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._watcher = _Watcher(self)
        self._popper = _Popper(self)
        self._store: Store | None = None
        self._node = ""
        self._is_closing = False
        self._is_lost = False
        self._threads: list[threading.Thread] = []

    # What the agent calls

    def fileno(self) -> int:
        return self._events.fileno()

    def events(self) -> list[RendezvousEvent]:
        return self._events.take()

    def join(self, node: Node, budget: Budget) -> None:
        if self._wish >= 0:
            node = replace(node, wish=self._wish)
        self._node = node.id
        now_ns = time.monotonic_ns()  # it may take a while until there is a store
        self._ask(lambda: self._participant.join(now_ns, node, budget))
        if not self._threads:
            self._start(self._step_all, "machine")

    def fail(self, failure: Failure) -> None:
        self._ask(lambda: self._participant.fail(failure))

    def succeed(self) -> None:
        self._ask(lambda: self._participant.succeed(time.monotonic_ns()))

    def end_job(self, reason: str) -> None:
        self._ask(lambda: self._participant.end_job(reason))

    def leave(self, reason: str) -> None:
        self._ask(lambda: self._participant.leave(reason))

    def num_nodes_waiting(self) -> int:
        return self._participant.num_nodes_waiting()

    def close(self) -> None:
        """Do what is still to be said, and go. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        deadline_ns = time.monotonic_ns() + CLOSE_NS
        self._news.put(None)
        for thread in self._threads[:2]:  # the machine, and who does what it wants
            thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        self._entrance.close(self._until_others_are_gone)
        if self._store:
            self._store.close()
        for thread in self._threads:
            thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9) + 0.1)
        self._events.close()

    # The machine

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"ronde-rendezvous-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, what: Callable[[], list[Effect]]) -> None:
        self._news.put(what)

    def tell(self, event: Event) -> None:
        """Something has happened; called by the threads that wait."""
        self._news.put(lambda: self._participant.step(time.monotonic_ns(), event))

    def lose_store(self, error: Exception) -> None:
        """The store is gone for good; called by the threads that wait."""
        if not self._is_closing:
            self._is_lost = True
            self._news.put(lambda: self._participant.give_up(f"the rendezvous cannot go on: {error}"))

    def _step_all(self) -> None:
        """The machine's thread."""
        try:
            self._store = self._enter()
            if self._store:
                self._start(self._operate, "operator")
                self._start(self._watcher.run, "watcher")
        except RondeError as error:
            self.lose_store(error)
        try:
            while self._step_once():
                pass
        except Exception as error:  # else the agent would wait for ever
            _log.exception("the rendezvous has failed")
            self._is_lost = True
            self._perform(self._participant.give_up(f"the rendezvous has failed: {error!r}"))
        self._operations.put(None)

    def _enter(self) -> Store | None:
        """Return the store, as soon as it is there. Raises what is wrong with it."""
        deadline_ns = time.monotonic_ns() + self._start_timeout_ns
        has_told = False
        while not self._is_closing:
            left_ns = deadline_ns - time.monotonic_ns()
            try:
                return self._entrance.enter(max(min(left_ns, CONNECT_NS), LEAST_NS))
            except TimeoutError as error:
                if left_ns <= CONNECT_NS:
                    message = str(error).partition("for the store ")[2] or str(error)
                    waited = f"waited {self._start_timeout_ns / 1e9:g} s for the store {message}"
                    raise TimeoutError(f"{waited}; {REMEDY}") from None
                if not has_told:
                    self._events.put(Notice(str(error)))
                has_told = True
        return None

    def _step_once(self) -> bool:
        """Wait for one piece of news, or for the clock. Returns whether to go on."""
        wait_ns = LONGEST_WAIT_NS
        if self._participant.has_joined and not self._is_lost:
            wait_ns = self._participant.wake_ns - time.monotonic_ns()
            if wait_ns <= 0:  # first, for news may never end
                self._perform(self._participant.step(time.monotonic_ns(), Tick()))
        try:
            news = self._news.get(timeout=max(wait_ns, 0) / 1e9)
        except queue.Empty:
            return True
        if news is None:
            return False
        self._perform(news())
        return True

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Tell(event):
                    self._events.put(event)
                case Watch(known):
                    self._watcher.watch(known)
                    self._operations.put(Set({self.bell: b"%d" % self._watcher.count}))
                case Pop(inbox):
                    before, must_start = self._popper.take_from(inbox)
                    if before:
                        self._operations.put(Push(before, NOTHING))
                    if must_start:
                        self._start(self._popper.run, "inbox")
                case _:
                    if not self._is_lost:
                        self._operations.put(effect)

    # The store

    @property
    def bell(self) -> str:
        """The key by which this node wakes its own watch."""
        return f"bell/{self._node}"

    def fork(self) -> Store:
        """Return another client of the store."""
        if self._store is None or self._is_closing:
            raise _Stopped
        return self._store.fork()

    def _operate(self) -> None:
        """The thread that does things."""
        assert self._store is not None
        try:
            while effect := self._operations.get():
                if event := _operate(self._store, effect):
                    self.tell(event)
            self._say_goodbye(self._store)
        except RondeError as error:
            self.lose_store(error)

    def _say_goodbye(self, store: Store) -> None:
        """Wake our own threads, so that they see that it is over."""
        self._watcher.stop()
        store.set(self.bell, b"over")
        if before := self._popper.take_from(None)[0]:
            store.queue_push(before, NOTHING)
        for thread in self._threads[2:]:
            thread.join(CLOSE_NS / 1e9)
        store.delete_key(self.bell)

    def _until_others_are_gone(self, timeout_ns: int) -> None:
        """They may not have seen the end yet, and the store that tells them ends with us."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        known: dict[str, bytes | None] = {
            alive_key(node): ALIVE for node in self._participant.others if node != self._node
        }
        if self._is_lost or self._store is None or any(thread.is_alive() for thread in self._threads):
            return  # a thread may be waiting in a call of the client
        try:
            while known and (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                for key in self._store.watch(known, left_ns):
                    del known[key]
        except RondeError:
            return


def _operate(store: Store, effect: Effect) -> Event | None:
    """Do it; return what comes of it."""
    match effect:
        case Set(values):
            if len(values) == 1:
                ((key, value),) = values.items()
                store.set(key, value)
            else:
                for key, value in values.items():  # together they may be too large
                    store.set(key, value)
            return Stored()
        case Hold(key, value):
            store.hold(key, value)
        case Push(inbox, value):
            store.queue_push(inbox, value)
        case Compare(expected, desired):
            return Compared(store.compare_set(STATE, expected, desired))
        case Look(known):
            return Seen(known, store.watch(known, 0))
        case Forget(prefix):
            store.delete_prefix(prefix)
    return None


class _Watcher:
    """The thread that watches."""

    def __init__(self, shell: OverStore) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._wanted: Mapping[str, bytes | None] = {}
        self._is_over = False
        self.count = 0

    def watch(self, known: Mapping[str, bytes | None]) -> None:
        """Watch these from now on, once the bell has been rung with our count."""
        with self._lock:
            self._wanted = known
            self.count += 1

    def stop(self) -> None:
        """It is over, once the bell has been rung."""
        self._is_over = True

    def run(self) -> None:
        store: Store | None = None
        try:
            store = self._shell.fork()
            self._watch(store)
        except _Stopped:
            pass
        except RondeError as error:
            self._shell.lose_store(error)
        finally:
            if store:
                store.close()

    def _watch(self, store: Store) -> None:
        known: dict[str, bytes | None] = {}
        bell: dict[str, bytes | None] = {self._shell.bell: None}
        count = 0
        while not self._is_over:
            with self._lock:
                if self.count != count:
                    known, count = dict(self._wanted), self.count
            changed = store.watch(known | bell, LONGEST_WAIT_NS)
            bell |= {key: value for key, value in changed.items() if key in bell}
            news = {key: value for key, value in changed.items() if key in known}
            known |= news
            if news:
                self._shell.tell(Seen({}, news))


class _Popper:
    """The thread that takes messages out of the leader's inbox."""

    def __init__(self, shell: OverStore) -> None:
        self._shell = shell
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
            store = self._shell.fork()
            while inbox := self._next():
                store = self._pop(store, inbox)
        except _Stopped:
            pass
        except RondeError as error:
            self._shell.lose_store(error)
        finally:
            if store:
                store.close()

    def _next(self) -> str | None:
        with self._lock:
            self._is_running = self._inbox is not None
            return self._inbox

    def _pop(self, store: Store, inbox: str) -> Store:
        try:
            value = store.queue_pop(inbox, LONGEST_WAIT_NS)
        except TimeoutError:
            return store
        except PeerError:  # it may have taken something that is lost
            store.close()
            store = self._shell.fork()
            self._shell.tell(PopFailed(inbox))
            return store
        if value != NOTHING:
            self._shell.tell(Popped(inbox, (value,)))
        return store
