"""The error from which elastic programs recover."""

from __future__ import annotations

from ronde.errors import PeerError as HorovodInternalError

__all__ = ["HorovodInternalError"]
