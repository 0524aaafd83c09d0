"""The rendezvous of nodes that share a store: the shell of `core/rendezvous`.

One thread steps the machine: it waits for news and for the machine's clock, and never for the store, whose threads are
those of a `Session`. If the store is lost, it looks for another one, and goes on there with a new session.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from ronde.core.rendezvous import Participant, Rules
from ronde.core.rendezvous_effects import Effect, Event, Tell, Tick
from ronde.core.rendezvous_state import ALIVE, Terms, alive_key
from ronde.core.round import Budget, Failure, Node, Notice, RendezvousEvent
from ronde.errors import PeerLostError, RondeError, TimeoutError
from ronde.net.rendezvous.events import Events
from ronde.net.rendezvous.session import Session
from ronde.net.rendezvous.succession import succeed_ended_job
from ronde.net.stores.base import Store

__all__ = ["Entrance", "OverStore"]

LONGEST_WAIT_NS = 60 * 10**9
CLOSE_NS = 3 * 10**9
CONNECT_NS = 10**9  # of one attempt, so that `close` need not wait longer
LEAST_NS = 10**8  # of the last one
LEAVING_NS = 3 * 10**9  # how long nodes of an earlier job may take to go
REMEDY = "start the node that serves it, correct --rdzv-endpoint, or wait longer (--start-timeout)"

_log = logging.getLogger(__name__)


class Entrance(Protocol):
    """How to get to the store."""

    def enter(self, timeout_ns: int) -> Store:
        """Return a client. Raises TimeoutError if there is none yet, other errors of this package if never."""

    def offer(self, node: Node) -> Node:
        """Return what this node says of itself, with where it would serve a store if this one is lost."""

    def enter_again(
        self, nodes: Sequence[Node], go_on: Callable[[], bool]
    ) -> tuple[Store, Collection[str]] | None:
        """Return a client of the store, or of the one that replaces it, and the ids of nodes that died with it.

        Called when the store was lost. `nodes`: of the last round. None if it cannot be replaced, or `go_on` says no.
        """

    def enter_other(self, address: str) -> Store:
        """Return a client of the store that replaces this one, for a node that came later. Raises as `enter`."""

    def serves(self) -> bool:
        """Return whether the store is served here."""

    def close(self, others: Callable[[int], None]) -> None:
        """Let go of what was served here. `others` waits until the other nodes are gone, up to so many nanoseconds."""


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
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        self._node = ""
        self._terms: Terms | None = None
        self._is_closing = False
        self._is_lost = False

    # What the agent calls

    def fileno(self) -> int:
        return self._events.fileno()

    def events(self) -> list[RendezvousEvent]:
        return self._events.take()

    def join(self, node: Node, budget: Budget) -> None:
        if self._wish >= 0:
            node = replace(node, wish=self._wish)
        self._node, self._terms = node.id, Terms.of(self._rules, budget)
        node = self._entrance.offer(node)
        now_ns = time.monotonic_ns()  # it may take a while until there is a store
        self._news.put(lambda: self._participant.join(now_ns, node, budget))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ronde-rendezvous", daemon=True)
            self._thread.start()

    def fail(self, failure: Failure) -> None:
        self._news.put(lambda: self._participant.fail(failure))

    def succeed(self) -> None:
        self._news.put(lambda: self._participant.succeed(time.monotonic_ns()))

    def end_job(self, reason: str) -> None:
        self._news.put(lambda: self._participant.end_job(reason))

    def leave(self, reason: str) -> None:
        self._news.put(lambda: self._participant.leave(reason))

    def serves_others(self) -> bool:
        return self._entrance.serves()

    def num_nodes_waiting(self) -> int:
        return self._participant.num_nodes_waiting()

    def close(self) -> None:
        """Do what is still to be said, and go. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        deadline_ns = time.monotonic_ns() + CLOSE_NS
        self._news.put(None)
        if self._thread:
            self._thread.join(CLOSE_NS / 1e9)
        session = self._session
        is_done = session is not None and not self._is_lost and session.finish(deadline_ns)
        others = self._participant.others if is_done else []
        self._entrance.close(lambda timeout_ns: self._until_gone(others, timeout_ns))
        if session:
            session.close()
            session.finish(deadline_ns)
        self._events.close()

    def _until_gone(self, others: Sequence[str], timeout_ns: int) -> None:
        """They may not have seen the end yet, and the store that tells them ends with us."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        known: dict[str, bytes | None] = {alive_key(node): ALIVE for node in others}
        try:
            while self._session and known and (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                for key in self._session.store.watch(known, left_ns):
                    del known[key]
        except RondeError:
            return

    # The thread

    def _run(self) -> None:
        try:
            self._enter()
            while self._step():
                pass
        except Exception as error:  # else the agent would wait for ever
            _log.exception("the rendezvous has failed")
            self._is_lost = True
            self._perform(self._participant.give_up(f"the rendezvous has failed: {error!r}"))

    def _enter(self) -> None:
        """Get to the store as soon as it is there."""
        deadline_ns = time.monotonic_ns() + self._start_timeout_ns
        has_told = False
        while not self._is_closing:
            left_ns = deadline_ns - time.monotonic_ns()
            try:
                if store := self._cross(self._entrance.enter(max(min(left_ns, CONNECT_NS), LEAST_NS))):
                    self._begin(store)
                return
            except TimeoutError as error:
                if left_ns <= CONNECT_NS:
                    message = str(error).partition("for the store ")[2] or str(error)
                    waited = f"waited {self._start_timeout_ns / 1e9:g} s for the store {message}"
                    self._give_up(f"{waited}; {REMEDY}")
                    return
                if not has_told:
                    self._events.put(Notice(str(error)))
                has_told = True
            except RondeError as error:
                self._give_up(str(error))
                return

    def _cross(self, store: Store) -> Store | None:
        """Return the store if this node may take part there. Raises TimeoutError if it has gone again."""
        assert self._terms
        silence_ns = self._rules.missing_beats * self._rules.heartbeat_ns
        patience_ns = max(silence_ns, LEAVING_NS)
        try:
            reason = succeed_ended_job(store, self._terms, patience_ns, lambda: not self._is_closing)
        except PeerLostError as error:  # its job ended, and its node with it
            store.close()
            time.sleep(LEAST_NS / 1e9)
            raise TimeoutError(str(error), operation="store", waited_ns=LEAST_NS) from None
        except BaseException:
            store.close()
            raise
        if reason:
            store.close()
            self._give_up(reason)
            return None
        return store

    def _begin(self, store: Store) -> None:
        self._session = Session(store, self._node, self._hear, self._lose, self._follow)

    def _give_up(self, reason: str) -> None:
        self._is_lost = True
        self._perform(self._participant.give_up(reason))

    def _hear(self, session: Session, event: Event) -> None:
        """Called by a session's threads: something has happened."""

        def step() -> list[Effect]:
            return self._participant.step(time.monotonic_ns(), event) if session is self._session else []

        self._news.put(step)

    def _lose(self, session: Session, error: Exception) -> None:
        """Called by a session's threads: the store is lost."""
        self._news.put(lambda: self._recover(session, error))

    def _follow(self, session: Session, address: str) -> None:
        """Called by a session's threads: the nodes meet elsewhere."""
        self._news.put(lambda: self._move(session, address))

    def _move(self, session: Session, address: str) -> list[Effect]:
        """Go where the others are. What this node knows is of a job that it has begun by itself."""
        if session is not self._session or self._is_lost or self._is_closing:
            return []
        try:
            store = self._entrance.enter_other(address)
        except RondeError as error:  # its holder has died
            _log.info("%s", error)
            return []
        session.close()
        self._begin(store)
        return self._participant.moved(time.monotonic_ns(), forget=f"the job goes on at {address}")

    def _recover(self, session: Session, error: Exception) -> list[Effect]:
        """Find the store again, or another one."""
        if session is not self._session or self._is_lost or self._is_closing:
            return []
        _log.info("%s", error)
        session.close()
        found = self._entrance.enter_again(self._participant.roster, lambda: not self._is_closing)
        if found is None:
            self._is_lost = True
            return self._participant.give_up(f"the rendezvous cannot go on: {error}")
        store, gone = found
        self._begin(store)
        return self._participant.moved(time.monotonic_ns(), gone)

    def _step(self) -> bool:
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
            if isinstance(effect, Tell):
                self._events.put(effect.event)
            elif self._session and not self._is_lost:
                self._session.perform(effect)
