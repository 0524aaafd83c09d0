"""A rendezvous' connection to a store, with its threads."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ronde.core.rendezvous.effects import Hold, Pop, Watch
from ronde.job_key import JobKey
from ronde.net.rendezvous import session
from ronde.net.stores.server import StoreServer
from ronde.net.stores.tcp import StoreClient

HANGING_NS = 60 * 10**9


def test_who_goes_leaves_no_thread_waiting_at_a_store_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LONGEST_WAIT_NS", 3600 * 10**9)
    key, lost = JobKey.generate(), []
    server = StoreServer("tcp:127.0.0.1:0", key)

    def ignore(*_: Any) -> None:
        pass

    ours = session.Session(
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
