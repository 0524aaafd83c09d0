"""Lets the nodes of a round know that all ranks have finished a training.

The agent of one node learns that from its workers (`process/membership_channel`). A loss can end the last barrier of
a training so that some ranks have passed it and others have not. Their nodes may differ, so an agent whose workers have
passed it writes that into the store of the round, and an agent whose workers have all lost the others looks there.

Both connect after `DELAY_NS` only: a job whose workers all end together, and one that recovers, need no connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ronde.job_key import JobKey
from ronde.launch.agent.store_wait import StoreWait
from ronde.launch.loop import Loop, Order

if TYPE_CHECKING:
    from ronde.stores.store import Store

__all__ = ["CompletionWatch"]

DELAY_NS = 10**9 // 5
FOREVER_NS = 10**18


class CompletionWatch:
    """The part of one agent. All methods run in the loop's thread.

    `completed` gets the number of the training that all ranks have finished, as another node knows.
    """

    def __init__(self, loop: Loop, key: JobKey, completed: Callable[[int], None]) -> None:
        self._writer = _StoreTask(loop, key, _write, lambda _: None)
        self._reader = _StoreTask(loop, key, _await, completed)

    def tell(self, store: str, training: int) -> None:
        """Write that all ranks have finished the training, into the store of the round at this address."""
        self._writer.begin(store, training)

    def await_completion(self, store: str, training: int) -> None:
        """Wait until another node has written that."""
        self._reader.begin(store, training)

    def stop_waiting(self) -> None:
        """End the wait, because the workers have a place in another round."""
        self._reader.stop()

    def close(self) -> None:
        """End what is under way."""
        self._writer.stop()
        self._reader.stop()


class _StoreTask:
    """Does something for one training at a time in the store of a round, and hands over the training's number."""

    def __init__(
        self, loop: Loop, key: JobKey, work: Callable[[Store, int], object], done: Callable[[int], None]
    ) -> None:
        self._loop, self._key = loop, key
        self._work, self._done = work, done
        self._asked: tuple[str, int] | None = None
        self._wait: StoreWait[object] | None = None

    def begin(self, address: str, training: int) -> None:
        """Begin soon, instead of an earlier one; a second call for the same does nothing."""
        if self._asked != (address, training):
            self.stop()
            self._asked = address, training
            self._loop.set_timer(self, time.monotonic_ns() + DELAY_NS, self._begin)

    def stop(self) -> None:
        """End it."""
        self._asked = None
        self._loop.set_timer(self, None, self._begin)
        if self._wait:
            self._loop.unwatch(self._wait.fileno())
            self._wait.close()
            self._wait = None

    def _begin(self) -> None:
        assert self._asked
        address, training = self._asked
        try:
            self._wait = StoreWait(address, self._key, lambda store: self._work(store, training))
        except (OSError, RuntimeError):  # no descriptor or thread is left; another round then decides
            return
        self._loop.watch(self._wait.fileno(), Order.NODES, self._end)

    def _end(self) -> None:
        asked = self._asked
        assert asked
        self.stop()
        self._asked = asked  # it is done
        self._done(asked[1])


def _key(training: int) -> str:
    return f"completed/{training}"


def _write(store: Store, training: int) -> None:
    store.set(_key(training), b"")


def _await(store: Store, training: int) -> None:
    store.get(_key(training), FOREVER_NS)
