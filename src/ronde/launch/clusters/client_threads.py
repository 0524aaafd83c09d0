"""Threads that call the client of a platform, such as Py4J of Flink: the interpreter ends after them.

CPython ends a daemon thread at any place when the interpreter ends, and a lock that the thread holds then, such as that
of a logging handler, stays locked. The finalizers of a client run later, in the main thread. They may wait for such a
lock, and the program would never end. With other threads, the program would not end while a platform does not answer.

So these are daemon threads, and the program waits for them when it ends: for a bounded time, and before the platform's
package ends its client.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["start_client_thread"]

LONGEST_WAIT_S = 5.0

_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_client_thread(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Start a daemon thread that calls the client of a platform. The interpreter waits for its end, at most 5 s.

    Raises nothing.

    Args:
        thread: The thread, which has not started.
        stop: Called when the interpreter ends, in the main thread. It lets the thread end soon, and returns at once.
    """
    _stops[thread] = stop
    atexit.unregister(_end_threads)
    atexit.register(_end_threads)  # the last one registered runs first: before the client's own
    thread.start()


def _end_threads() -> None:
    running = [(thread, _stops[thread]) for thread in threading.enumerate() if thread in _stops]
    for _, stop in running:
        stop()
    ends_s = time.monotonic() + LONGEST_WAIT_S
    for thread, _ in running:
        thread.join(max(0.0, ends_s - time.monotonic()))
