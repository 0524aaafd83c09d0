"""Whether another user can have decided what a file or folder contains, as texts for errors.

Only the owner of a file, and whoever its mode lets write, decides on its content. What is in a folder, its owner and
whoever may write there can replace, also files that they may not read.
"""

from __future__ import annotations

import os
import stat

__all__ = ["OTHERS_WRITE", "describe_foreign_owner", "describe_other_writers"]

OTHERS_WRITE = 0o022


def describe_foreign_owner(status: os.stat_result, name: str) -> str | None:
    """Return a text if another user owns the file or folder, else None. `name`: for the text."""
    if status.st_uid == os.geteuid():
        return None
    return f"{name} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"


def describe_other_writers(status: os.stat_result, name: str) -> str | None:
    """Return a text if the mode lets other users write, else None. `name`: for the text."""
    if not status.st_mode & OTHERS_WRITE:
        return None
    return f"others may write to {name} (mode {stat.S_IMODE(status.st_mode):04o})"
