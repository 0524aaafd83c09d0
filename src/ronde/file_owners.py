"""Whether another user can have decided what a file or folder contains, as texts for errors.

Only the owner of a file, and whoever its mode lets write, decides on its content. What is in a folder, its owner and
whoever may write there can replace, also files that they may not read.

The private group of a user, with the user's name and without other members, lets nobody else write. Where it is usual,
so is a umask of 002.
"""

from __future__ import annotations

import os
import stat

__all__ = ["describe_foreign_owner", "describe_other_writers"]


def describe_foreign_owner(status: os.stat_result, name: str) -> str | None:
    """Return a text if another user owns the file or folder, else None. `name`: for the text."""
    if status.st_uid == os.geteuid():
        return None
    return f"{name} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"


def describe_other_writers(status: os.stat_result, path: str) -> str | None:
    """Return a text if the mode lets other users write, else None. `path`: of the file or folder."""
    mode = stat.S_IMODE(status.st_mode)
    by_group = mode & stat.S_IWGRP and (_has_access_list(path) or not _is_private_group(status.st_gid))
    return f"others may write to {path} (mode {mode:04o})" if by_group or mode & stat.S_IWOTH else None


def _has_access_list(path: str) -> bool:
    """Return whether a list grants rights to further users. The mode has those of all of them as the group's."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:  # there is none, or the file system has no such lists
        return False


def _is_private_group(gid: int) -> bool:
    """Return whether the group is the private one of this process's user.

    The name is compared, too, because a directory service need not list the users who have a primary group.
    """
    import grp  # only for files that a group may write
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if user.pw_gid != gid or group.gr_name != user.pw_name or not {user.pw_name}.issuperset(group.gr_mem):
        return False
    return all(other.pw_name == user.pw_name for other in pwd.getpwall() if other.pw_gid == gid)
