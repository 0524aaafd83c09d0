"""A rendezvous' connection to a store, with its threads."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest

from ronde.job_key import JobKey
from ronde.rendezvous import store_session
from ronde.rendezvous.effects import Changes, Event, Hold, Pop, Watch
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

HANGING_NS = 60 * 10**9


def test_a_closed_session_leaves_no_thread_waiting_at_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_session, "LONGEST_WAIT_NS", 3600 * 10**9)
    key, lost = JobKey.generate(), []
    server = StoreServer("tcp:127.0.0.1:0", key)

    def ignore(*_: Any) -> None:
        pass

    ours = store_session.StoreSession(
        StoreClient(server.address, key, HANGING_NS), "a", ignore, lambda *what: lost.append(what), ignore
    )
    for effect in (Hold("alive/a", b"alive"), Watch({"state": None}), Pop("inbox")):
        ours.perform(effect)
    other = StoreClient(server.address, key, HANGING_NS)
    other.wait(["alive/a"], HANGING_NS)
    ours.close()
    other.watch({"alive/a": b"alive"}, HANGING_NS)
    assert ours.finish(time.monotonic_ns() + HANGING_NS)
    assert not lost
    other.close()
    server.close()


def test_a_second_session_wakes_its_watch_while_the_store_still_has_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a cable was pulled for a while: the store has not noticed that the first connection is over."""
    monkeypatch.setattr(store_session, "LONGEST_WAIT_NS", 3600 * 10**9)
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)

    def begin(tell: Callable[[store_session.StoreSession, Event], None]) -> store_session.StoreSession:
        def ignore(*_: Any) -> None:
            pass

        return store_session.StoreSession(
            StoreClient(server.address, key, HANGING_NS), "a", tell, ignore, ignore
        )

    other = StoreClient(server.address, key, HANGING_NS)
    other.set("state", b"new")
    both = []
    for _ in range(2):
        heard: queue.SimpleQueue[Event] = queue.SimpleQueue()
        both.append(begin(lambda _, event, heard=heard: heard.put(event)))  # type: ignore[misc]
        time.sleep(0.2)  # until its watch waits
        both[-1].perform(Watch({"state": None}))
        assert heard.get(timeout=HANGING_NS / 1e9) == Changes({}, {"state": b"new"})
    for each in both:
        each.close()
        assert each.finish(time.monotonic_ns() + HANGING_NS)
    other.close()
    server.close()
