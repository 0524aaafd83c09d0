"""Runs functions at the end of the process, after the engine has shut down.

Python runs handlers of `atexit` in the opposite order of their registration. So handlers that other modules register
after they have imported this one run before.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["at_exit"]

_last: list[Callable[[], None]] = []


def at_exit(action: Callable[[], None]) -> None:
    """Run the action at the end, after all handlers registered with `atexit` since this module was imported."""
    _last.append(action)


def _run_actions() -> None:
    for action in _last:
        action()


atexit.register(_run_actions)
