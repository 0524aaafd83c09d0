"""File descriptors of this process: whether they are still its own, and how many it may have.

The program may close descriptors without Ronde's knowledge, by `os.closerange` for example. A file that it opens
afterwards may have the number of such a descriptor. So the owner of a descriptor remembers which file it has opened,
and leaves any other file alone. C++ does the same (cpp/system/descriptor.h).

The limit of this check: all files of eventfd(2) share one inode, and so do those of epoll(7), so it cannot tell one of
them from another. Pipes and sockets each have an inode.

The soft limit of the number of descriptors is low for the sake of old programs; `raise_descriptor_limit` raises it.
"""

from __future__ import annotations

import errno
import os
import resource
import socket

from ronde.errors import UsageError

__all__ = [
    "FileIdentity",
    "OwnSocket",
    "close_own",
    "file_identity",
    "is_own",
    "make_room",
    "raise_descriptor_limit",
]

MOST = 21_000  # a store's clients and the other descriptors of a process
SPARE = 64  # for files that the program opens meanwhile

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


def raise_descriptor_limit() -> bool:
    """Raise the limit to enough descriptors, or to the hard limit; return whether it has risen."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST, hard)
    if soft >= wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


def make_room(count: int, purpose: str) -> None:
    """Raise the limit so that the process can open `count` more descriptors, which `purpose` needs.

    Raises UsageError if the hard limit forbids it, or if /proc is not mounted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    is_open = _count_open(purpose)
    needed = is_open + count
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{purpose} needs {count} file descriptors in this process, which has {is_open} open and may have {hard}: "
            f"raise the hard limit (ulimit -Hn) to {needed + SPARE} or more, or use fewer ranks"
        )
    wanted = needed + SPARE if hard == resource.RLIM_INFINITY else min(needed + SPARE, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _count_open(purpose: str) -> int:
    """Return how many descriptors this process has open."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise UsageError(
            f"{purpose}: cannot read /proc/self/fd ({error.strerror}): Ronde watches processes by /proc, which this "
            "machine or container lacks: mount -t proc proc /proc"
        ) from None
