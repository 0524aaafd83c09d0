"""The job's key travels to tasks with their tickets. Not every platform encrypts what it sends to them."""

from __future__ import annotations

import logging

from ronde.errors import UsageError

__all__ = ["report_unencrypted"]

_log = logging.getLogger(__name__)


def report_unencrypted(platform: str, remedy: str, is_refused: bool) -> None:
    """Warn that the platform sends the key in the clear, with the way to change that; raise UsageError instead if so.

    `is_refused`: whether the caller allows encrypted connections only.
    """
    text = (
        f"{platform} sends its tasks unencrypted, and the job's key with them, so anybody who reads the network can "
        f"join the job: {remedy}"
    )
    if is_refused:
        raise UsageError(text)
    _log.warning("%s", text)
