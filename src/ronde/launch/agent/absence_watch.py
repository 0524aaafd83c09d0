"""Finds out whether a rank of another node waits in `ronde.init` for a worker of this node that has ended.

Workers announce to the agent of their node that they begin to join (`process/uncaught`). Those of other nodes do not,
but they come to an epoch in the store of the round (`comm/world_epochs`). A thread waits until one has come to an epoch
without this worker. It connects only `DELAY_NS` after the end of the worker, so a round whose workers all end together
needs no connection.

The keys name the size of the world: a program may make a smaller one, in which this worker has no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ronde.job_key import JobKey
from ronde.launch.agent.store_wait import StoreWait
from ronde.launch.agent.worker_group import Absent
from ronde.launch.loop import Loop, Order

if TYPE_CHECKING:
    from ronde.stores.store import Store

__all__ = ["AbsenceWatch"]

DELAY_NS = 1_000_000_000
FOREVER_NS = 10**18


class AbsenceWatch:
    """Watches the worker of this node that others would miss first. All methods run in the loop's thread.

    `missed` gets its rank, and the rank that waits for it.
    """

    def __init__(self, loop: Loop, key: JobKey, missed: Callable[[int, int], None]) -> None:
        self._loop = loop
        self._key = key
        self._missed = missed
        self._address, self._size, self._absent = "", 0, Absent(0, 0)
        self._wait: StoreWait[int] | None = None

    def watch_round(self, store: str, size: int, absent: Absent | None) -> None:
        """Watch this worker, instead of an earlier one.

        `store`: where the ranks of the round meet. `size`: how many ranks there are.
        """
        self.stop()
        if absent:
            self._address, self._size, self._absent = store, size, absent
            self._loop.set_timer(self, time.monotonic_ns() + DELAY_NS, self._begin)

    def stop(self) -> None:
        """Watch no worker."""
        self._loop.set_timer(self, None, self._begin)
        if self._wait:
            self._loop.unwatch(self._wait.fileno())
            self._wait.close()
            self._wait = None

    close = stop

    def _begin(self) -> None:
        find = partial(_await_waiting, size=self._size, absent=self._absent.rank)
        try:
            self._wait = StoreWait(self._address, self._key, find)
        except (
            OSError,
            RuntimeError,
        ):  # no descriptor or thread is left; the waiting rank gives up by its own limit
            return
        self._loop.watch(self._wait.fileno(), Order.NODES, self._read)

    def _read(self) -> None:
        assert self._wait
        waiting, rank = self._wait.take(), self._absent.rank
        self.stop()
        self._missed(rank, waiting)


def _await_waiting(store: Store, size: int, absent: int) -> int:
    """Return the first rank found that has come to an epoch without the absent one."""
    from ronde.comm.world_epochs import Epoch, WorldKeys

    keys = WorldKeys(size)
    epoch = Epoch.decode(store.get(keys.counter, FOREVER_NS))
    while store.check([keys.member(epoch, absent)]):
        store.watch({keys.counter: epoch.encode()}, FOREVER_NS)
        epoch = Epoch.decode(store.get(keys.counter, 0))
    members = {keys.member(epoch, rank): rank for rank in range(size)}
    return members[next(iter(store.watch(dict.fromkeys(members), FOREVER_NS)))]
