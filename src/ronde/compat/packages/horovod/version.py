"""`horovod.version`: the version of Horovod whose names these are."""

from __future__ import annotations

from . import __version__

__all__ = ["__version__"]
