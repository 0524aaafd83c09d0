"""The part of Horovod that all frameworks share: errors, process sets, and functions about the installation."""

from __future__ import annotations

from . import exceptions, process_sets, util

__all__ = ["exceptions", "process_sets", "util"]
