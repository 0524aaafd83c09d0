"""Sends Ronde's log lines to the program's handlers, or to stderr if the program has none.

Ronde logs below the logger "ronde". The root logger belongs to the program, and Ronde never changes it. A handler that
the program installs later, at the root or at "ronde", takes over.
"""

from __future__ import annotations

import logging
import sys

from ronde.net.host import host_name
from ronde.settings import Settings

__all__ = ["apply_log_settings", "log_as_rank"]

_ours = logging.getLogger("ronde")


class _Stderr(logging.Handler):
    """Writes lines that name the rank and its host, unless the program has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None or logging.getLogger().handlers or _ours.handlers != [self]:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")  # in one piece, because other ranks write there, too
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_stderr = _Stderr()


def log_as_rank(rank: int) -> None:
    """Name this rank in every log line from now on."""
    _set_format(rank, hide_time=False)
    if _stderr not in _ours.handlers and not _ours.hasHandlers():
        _ours.addHandler(_stderr)


def apply_log_settings(wanted: Settings, rank: int) -> None:
    """Log from the level of the settings on, in their format."""
    _ours.setLevel(wanted.log_level.upper())
    _set_format(rank, wanted.log_hide_time)


def _set_format(rank: int, hide_time: bool) -> None:
    time = "" if hide_time else "%(asctime)s.%(msecs)03d "
    host = host_name().replace("%", "%%")
    line = f"{time}%(levelname)s rank {rank} on {host}: %(name)s: %(message)s"
    _stderr.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
