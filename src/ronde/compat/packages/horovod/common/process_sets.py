"""Horovod keeps process sets here."""

from __future__ import annotations

from ronde.engine.process import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
