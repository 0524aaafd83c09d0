"""Runs functions at the end of the process, after the engine has shut down.

Handlers of `atexit` run in the opposite order of their registration: whoever imports this before it registers its own
goes first.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["at_exit"]

_last: list[Callable[[], None]] = []


def at_exit(action: Callable[[], None]) -> None:
    """Do this at the end, after whatever was registered with `atexit` since this module was imported."""
    _last.append(action)


def _run_actions() -> None:
    for action in _last:
        action()


atexit.register(_run_actions)
