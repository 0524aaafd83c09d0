"""Whose process is at the other end of a Unix socket: the kernel says, and nobody can claim to be another user.

Both ends ask, at every Unix socket that has a name, before they send or believe anything. Only processes of our own
user pass; root, too, is another user to everybody else, and everybody else to root: a job of root's is not to take
orders from a user, and a user's job that root enters by mistake would hand its data to the wrong job.
"""

from __future__ import annotations

import os
import socket
import struct

from ronde.errors import AuthenticationError

__all__ = ["check_user", "process_and_user"]

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


def process_and_user(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a Unix socket, as `check_user` explains."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return process, user


def check_user(sock: socket.socket) -> None:
    """Raise AuthenticationError if another user's process is at the other end of a Unix socket. TCP does not tell.

    For a connection that we opened that is the process that listens; for one that we accepted, the one that called.
    """
    if sock.family != socket.AF_UNIX:
        return
    process, user = process_and_user(sock)
    if user != os.geteuid():
        raise AuthenticationError(
            f"the other end of this Unix socket is process {process} of user {user}, and we are user {os.geteuid()}: "
            "run all processes of a job as one user"
        )
