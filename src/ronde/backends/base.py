"""The names of `ronde.backends` under the module that plugins of other packages import them from."""

from __future__ import annotations

from ronde.backends.backend import Backend, BackendContext, DeviceBackend, Patience

__all__ = ["Backend", "BackendContext", "DeviceBackend", "Patience"]
