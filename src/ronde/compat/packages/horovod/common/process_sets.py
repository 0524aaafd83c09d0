"""Horovod keeps process sets here."""

from __future__ import annotations

from ronde.engine.process import add_process_set, global_process_set, remove_process_set
from ronde.engine.process_sets import ProcessSet

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
