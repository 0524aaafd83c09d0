"""Descriptors that the program may have closed without Ronde's knowledge, by `os.closerange` for example.

A file that the program opens afterwards may have the number of such a descriptor. So its owner remembers which file it
has opened, and leaves any other file alone. C++ does the same (cpp/system/descriptor.h).

The limit: all files of eventfd(2) share one inode, and so do those of epoll(7), so this cannot tell one of them from
another. Pipes and sockets each have an inode.
"""

from __future__ import annotations

import errno
import os
import socket

__all__ = ["FileIdentity", "OwnSocket", "close_own", "file_identity", "is_own"]

FileIdentity = tuple[int, int]  # device, inode


def file_identity(descriptor: int) -> FileIdentity:
    """Return which file an open descriptor has. Raises OSError if it is closed."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def is_own(descriptor: int, identity: FileIdentity) -> bool:
    """Return whether the descriptor is still open, with this file."""
    try:
        return file_identity(descriptor) == identity
    except OSError as error:
        return error.errno != errno.EBADF  # a file server may have forgotten the file


def close_own(descriptor: int, identity: FileIdentity) -> None:
    """Close the descriptor, unless the program has closed it."""
    if is_own(descriptor, identity):
        os.close(descriptor)


class OwnSocket(socket.socket):
    """A socket whose `close` and finalizer do nothing if the program has closed its descriptor."""

    __slots__ = ("_identity",)

    def __init__(self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        super().__init__(family, kind, proto, fileno)
        self._identity = file_identity(self.fileno())

    def __del__(self) -> None:
        if self.fileno() >= 0 and not self.is_own():
            self.detach()
        super().__del__()  # type: ignore[misc]

    def is_own(self) -> bool:
        """Return whether the descriptor is still open, with this socket."""
        return is_own(self.fileno(), self._identity)

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if not self.is_own():
            self.detach()
        super().close()
