"""The part of Horovod that all frameworks share: errors, process sets, and functions about job and installation."""

from __future__ import annotations

from . import basics, exceptions, process_sets, util

__all__ = ["basics", "exceptions", "process_sets", "util"]
