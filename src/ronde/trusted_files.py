"""Files among those of other users: who may have decided what is in them, and how to open them safely.

Only the owner of a file, and a user whom its mode lets write, decides on its content. What is in a folder can be
replaced by the folder's owner and by all users who may write there, also files that they may not read. The private
group of a user, with the user's name and without other members, lets nobody else write. Where it is usual, so is a
umask of 002.

In a directory like /tmp, another user can make a link with the name that a process is about to use, to one of its
files, or a file whose content the process would then believe. `create_anew`, `open_for_writing` and `open_kept` open
files there without that risk.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress

__all__ = [
    "create_anew",
    "describe_foreign_owner",
    "describe_other_writers",
    "open_for_writing",
    "open_kept",
    "owner_of_new_files",
]


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
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if user.pw_gid != gid or group.gr_name != user.pw_name or not {user.pw_name}.issuperset(group.gr_mem):
        return False
    return all(other.pw_name == user.pw_name for other in pwd.getpwall() if other.pw_gid == gid)


def create_anew(path: str | os.PathLike[str], flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """Return the descriptor of a new file. A file or link of this name is removed, neither followed nor written to.

    Raises OSError, also if the file belongs to another user and cannot be removed.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags, mode)
    os.unlink(path)
    return os.open(path, flags, mode)


def open_for_writing(path: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a file that the user has named; create it if it does not exist.

    It follows only links of this user and of root (/dev/stdout). Raises OSError, ELOOP for another user's link.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)


def open_kept(path: str | os.PathLike[str]) -> int:
    """Return the descriptor, to read and write, of a file whose content we trust; create it for this user only.

    Raises OSError as `open_for_writing`, and for another user's file in a directory where all users may create files.
    """
    fd = _open(path, os.O_RDWR | os.O_CREAT, 0o600)
    user = os.fstat(fd).st_uid
    # In other directories the owner decides whose files are there; and a file server may map root to another number.
    if user != os.geteuid() and os.stat(os.path.dirname(path) or ".").st_mode & stat.S_ISVTX:
        os.close(fd)
        raise OSError(
            errno.EPERM, f"it belongs to user {user}, in a directory where all users may create files"
        )
    return fd


def owner_of_new_files(folder: str | os.PathLike[str]) -> int | None:
    """Return the number of the user that owns a file which this process creates there; None if it may create none.

    A file server may map the user of a process to another one, such as root to nobody (`root_squash`).
    """
    draft = os.path.join(folder, f"draft-{os.urandom(8).hex()}")
    try:
        fd = create_anew(draft, mode=0o600)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(draft)


def _open(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise
    return os.open(path, flags, mode)
