"""Opens files in directories where other users may write, without writing to files that they have prepared.

In a directory like /tmp, another user can make a link with the name that we are about to use, to one of our files, or a
file whose content we would then believe.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

__all__ = ["create_anew", "open_for_writing", "open_kept", "owner_of_new_files"]


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
