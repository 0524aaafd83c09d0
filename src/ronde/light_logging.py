"""Loggers that are loaded when they are first used, for modules that the launcher loads.

The launcher rarely logs, and the standard module would delay each start by 5 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from logging import Logger

__all__ = ["logger"]


def logger(name: str) -> Logger:
    """Return the standard module's logger of that name."""
    return cast("Logger", _LateLogger(name))


class _LateLogger:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            from logging import getLogger
        except OSError:  # no descriptor is left to read the module: this message is lost, and nothing else
            return lambda *_arguments, **_options: None
        return getattr(getLogger(self._name), attribute)
