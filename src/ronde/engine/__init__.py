"""The engine: named tensors, submitted in any order by any thread, negotiated, fused and run in the background."""

from __future__ import annotations

from ronde._native import Handle
from ronde.engine.process import engine, init, shutdown, submit

__all__ = ["Handle", "engine", "init", "shutdown", "submit"]
