"""Files that we make where others may write, too: nothing is written to what they have put there before us.

A directory like /tmp lets everybody make a link with the name that we are about to use, to a file of ours, or a file
of theirs that we would fill and then believe.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

__all__ = ["create_anew", "open_for_writing", "open_kept"]


def create_anew(path: str | os.PathLike[str], flags: int = os.O_WRONLY, mode: int = 0o666) -> int:
    """Return the descriptor of a new file, for a draft. What has its name is removed, neither followed nor written to.

    Raises OSError, also if that is another user's and cannot be removed.
    """
    flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags, mode)
    os.unlink(path)
    return os.open(path, flags, mode)


def open_for_writing(path: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a file that the user has named, made if there is none; a link only if it is ours.

    Root's links are everybody's (/dev/stdout). Raises OSError, ELOOP for the link of somebody else.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)


def open_kept(path: str | os.PathLike[str]) -> int:
    """Return the descriptor, to read and write, of a file whose content we believe; made for us alone if there is none.

    Raises OSError as `open_for_writing`, and for another user's file in a directory where everybody may make files.
    """
    fd = _open(path, os.O_RDWR | os.O_CREAT, 0o600)
    user = os.fstat(fd).st_uid
    # Elsewhere it is for the directory's owner to say; and a file server may call root by another number.
    if user != os.geteuid() and os.stat(os.path.dirname(path) or ".").st_mode & stat.S_ISVTX:
        os.close(fd)
        raise OSError(errno.EPERM, f"it is a file of user {user}, where everybody may make files")
    return fd


def _open(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    flags |= os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise
    return os.open(path, flags, mode)
