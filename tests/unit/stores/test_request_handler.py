"""The answers of a served store's request handler."""

from __future__ import annotations

from ronde.stores.request_handler import RequestHandler
from ronde.stores.wire import StoreOperation, pack_known

LONG = 30 * 10**9


def test_a_watcher_that_died_with_the_holder_gets_no_answer() -> None:
    """A killed agent loses all its connections at once: the one that holds a key, and those that watch it."""
    handler = RequestHandler()
    holder, watcher, other = (handler.open_session(b"") for _ in range(3))
    holder.connection, watcher.connection, other.connection = "holder", "watcher", "other"
    handler.answer_request(holder, StoreOperation.HOLD, 0, 0, b"alive", b"1")
    watch = StoreOperation.WATCH, 0, LONG, b"", pack_known({b"alive": b"1"})
    assert handler.answer_request(watcher, *watch) is None
    assert handler.answer_request(other, *watch) is None
    holder.connection = watcher.connection = None
    handler.note_departure(holder, 0)
    assert [connection for connection, _ in handler.woken] == ["other"]
