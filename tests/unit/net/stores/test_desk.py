"""What the desk of a served store answers to whom."""

from __future__ import annotations

from ronde.net.stores.request_handler import RequestHandler
from ronde.net.stores.wire import StoreOperation, pack_known

LONG = 30 * 10**9


def test_nobody_is_told_who_died_with_the_holder() -> None:
    """A killed agent loses all its connections at once: the one that holds a key, and those that watch it."""
    desk = RequestHandler()
    holder, watcher, other = (desk.welcome(b"") for _ in range(3))
    holder.connection, watcher.connection, other.connection = "holder", "watcher", "other"
    desk.ask(holder, StoreOperation.HOLD, 0, 0, b"alive", b"1")
    watch = StoreOperation.WATCH, 0, LONG, b"", pack_known({b"alive": b"1"})
    assert desk.ask(watcher, *watch) is None
    assert desk.ask(other, *watch) is None
    holder.connection = watcher.connection = None
    desk.leave(holder, 0)
    assert [connection for connection, _ in desk.woken] == ["other"]
