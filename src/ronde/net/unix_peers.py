"""Checks the user at the other end of a Unix socket. The kernel reports it, so no process can claim another user.

Both ends check, at every Unix socket that has a name, before they send or believe anything. Only processes of the same
user pass, and root is no exception: a job of root must not take orders from a user, and a process of root that joins a
user's job by mistake would give its data to the wrong job.
"""

from __future__ import annotations

import os
import socket
import struct

from ronde.errors import AuthenticationError

__all__ = ["check_user", "process_and_user"]

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


def process_and_user(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a Unix socket; see `check_user`."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process, user


def check_user(sock: socket.socket) -> None:
    """Raise AuthenticationError if another user's process is at the other end of a Unix socket; ignores TCP.

    On the connecting side that process is the one that listens; on the accepting side, the one that connected.
    """
    if sock.family != socket.AF_UNIX:
        return
    process, user = process_and_user(sock)
    if user != os.geteuid():
        raise AuthenticationError(
            f"the other end of this Unix socket is process {process} of user {user}, and this process "
            f"runs as user {os.geteuid()}: run all processes of a job as one user"
        )
