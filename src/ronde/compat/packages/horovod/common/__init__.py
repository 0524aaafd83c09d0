"""What Horovod's frameworks have in common: the errors, process sets, and questions about the installation."""

from __future__ import annotations

from . import exceptions, process_sets, util

__all__ = ["exceptions", "process_sets", "util"]
